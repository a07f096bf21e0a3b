// What the decode kernels need of the hardware, one small function each: bf16 arithmetic, tensor-core products, asynchronous copies,
// and the overlap of one kernel's start with the end of the one before it. TANDEM_EMULATE replaces them by plain C++ so that the
// kernels' logic runs in tests on a machine without a GPU.
#pragma once

#ifdef TANDEM_EMULATE
#include "emulation.h"
#else
#include <cuda_runtime.h>
#include <stdint.h>

#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// D += A (16 x 16, rows) * B (16 x 8, columns); lane = 4 * g + c holds rows g and g + 8 of A and D, column g of B.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with signed bytes, 32 columns of A: d is exact. Words a0, a1, b0 hold columns 4 c .. 4 c + 3, a2, a3, b1 those 16 further on.
__device__ __forceinline__ void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Subnormal operands count: the 4-bit decoder relies on it.
__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t bf16x2_pack(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ uint32_t rotate_left(uint32_t x, int n) { return __funnelshift_l(x, x, n); }

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes of this thread into shared memory, not through L1.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One thread starts a copy of `bytes` (a multiple of 16) that completes `barrier`, which it also arms.
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// One thread starts a copy of `bytes` (a multiple of 16) out of shared memory, which a bulk copy has filled; the target may be another GPU's.
// Its own copies since the last commit are one group. `wait_read`: all but the newest PENDING groups have been read, `wait`: are written.
__device__ __forceinline__ void store_bulk(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void store_bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void store_bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void store_bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Asks for `bytes` (a multiple of 16) into L2. What other multiprocessors write there later is seen all the same.
__device__ __forceinline__ void prefetch_bulk(const void* global, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// This thread's arrival once all of its `copy_async_16` so far are done.
__device__ __forceinline__ void copy_async_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until other blocks have raised a counter in device memory to `count`; what they wrote before is then visible to the warp.
__device__ __forceinline__ void wait_for_count(const int32_t* counter, int count) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
  __syncwarp();
}

// Raises a counter in device memory once what this thread, and those it has met at a barrier, wrote before is visible on the device.
__device__ __forceinline__ void add_release(int32_t* counter, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

// What this thread, and those it has met at a barrier, wrote before is visible on every GPU to who acquires the value.
__device__ __forceinline__ void store_release_system(uint32_t* p, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ int32_t load_relaxed(const int32_t* p) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// Both halves of one moment: the lower one turns over every 4.3 s, and may do so between two reads.
__device__ __forceinline__ long long time_ns() {
  uint32_t high, low, again;
  do {
    asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(high));
    asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(low));
    asm volatile("mov.u32 %0, %globaltimer_hi;" : "=r"(again));
  } while (high != again);
  return static_cast<long long>(static_cast<uint64_t>(high) << 32 | low);
}
__device__ __forceinline__ void let_others_run() {}  // for the emulation, where threads take turns

// Waits until the kernel before this one has finished and its writes are visible. Nothing that it wrote may be touched earlier.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel start its own preparation once every block has come here.
__device__ __forceinline__ void start_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Registers a thread, for all four warps of a warpgroup; who takes waits until others have left enough. A block never has more than it was
// launched with.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ uint4 load_global_16(const void* p) { return __ldcg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ uint4 load_stream_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Launches with the programmatic edge to the kernel before it, in a stream or under graph capture.
template <typename... Formal, typename... Actual>
int launch(void (*kernel)(Formal...), dim3 grid, int threads, int shared_bytes, void* stream, Actual... args) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  error = cudaLaunchKernelEx(&config, kernel, static_cast<Formal>(args)...);
  return static_cast<int>(error);
}
#endif

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float bf16_to_float(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
__device__ __forceinline__ uint16_t bf16_from_float(float x) { return static_cast<uint16_t>(bf16x2_pack(x, 0.0f) & 0xFFFFu); }

// Integers in the order of the floats, and back; -0 is 0.
__device__ __forceinline__ int order_of(float v) {
  const int bits = static_cast<int>(__float_as_uint(v + 0.0f));
  return bits ^ (bits >> 31 & 0x7FFFFFFF);
}
__device__ __forceinline__ float float_from_order(int order) { return __uint_as_float(static_cast<uint32_t>(order ^ (order >> 31 & 0x7FFFFFFF))); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}
