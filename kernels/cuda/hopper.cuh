// Hopper's matrix units, tensor copies and what a warp-specialised kernel needs around them, one small function each. TANDEM_EMULATE
// replaces them by plain C++ (`emulation_hopper.h`), which keeps the address arithmetic of descriptors and swizzle and the layout of fragments.
//
// An operand in shared memory is a stack of rows of 128 FP8 values, 8 rows a group of 1,024 bytes at a multiple of 1,024; the 16 bytes
// at position c of row r lie at position c ^ (r % 8), as a tensor copy with 128-byte swizzle writes them.
#pragma once

#include "primitives.cuh"

#ifdef TANDEM_EMULATE
#include "emulation_hopper.h"
#else
#include <cuda.h>

// Cycles of a wait that another part of the kernel should end: 2 s at least. One read of the multiprocessor's own clock; `time_ns` takes three.
constexpr long long PATIENCE = 4000000000;
__device__ __forceinline__ long long cycles() {
  long long now;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(now));
  return now;
}

// One bulk copy of a box of a tensor into shared memory; the bytes count towards `barrier`, which somebody has told to expect them.
__device__ __forceinline__ void copy_box(void* shared, const CUtensorMap& map, int column, int row, int matrix, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(matrix)
      : "memory");
}
// The same into both blocks of a cluster of two, at the same place, each telling its own barrier.
__device__ __forceinline__ void copy_box_to_both(void* shared, const CUtensorMap& map, int column, int row, int matrix, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(matrix), "h"(static_cast<uint16_t>(3))
      : "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster that have not ended meet.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Arrives at the barrier in the same place of a block of the cluster: what this thread has read there may be overwritten.
__device__ __forceinline__ void barrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(
                   shared_address(barrier)),
               "r"(rank)
               : "memory");
}
// Writes a number to the same place of a block of the cluster; its 4 bytes count towards that block's barrier, as those of a copy do.
__device__ __forceinline__ void send(int* shared, int value, uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 to, there;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 there, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [to], %1, [there];\n}" ::"r"(shared_address(shared)),
      "r"(value), "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  uint32_t is_passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(is_passed)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return is_passed;
}
__device__ __forceinline__ void end_with_error() { __trap(); }

// Threads of some whole warps meet; `id` from 1 to 15.
template <int THREADS>
__device__ __forceinline__ void meet(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// The same value in all lanes, which the compiler does not know.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

// 8 x 8 values of 16 bits, row i in lanes 4 i .. 4 i + 3: transposed.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Two values to FP8 e4m3, rounded to nearest even, those out of reach to 448.
__device__ __forceinline__ uint32_t fp8x2_pack(float low, float high) {
  uint16_t d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Orders the compiler's use of accumulators with the asynchronous products around it.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// Where an operand lies: rows of 128 bytes, 128-byte swizzle.
__device__ __forceinline__ uint64_t operand(const void* p) {
  return static_cast<uint64_t>((shared_address(p) & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// D += A * B over 32 columns: A 64 rows, B N rows of FP8 e4m3, one warpgroup. Thread 32 w + 4 g + c holds in d[4 j + 2 s + b] row
// 16 w + 8 s + g and column 8 j + 2 c + b. Started here; done when `product_wait` says so.
template <int N>
__device__ __forceinline__ void product(float (&d)[N / 2], uint64_t a, uint64_t b);

#define TANDEM_D0 "%0,%1,%2,%3"
#define TANDEM_D1 TANDEM_D0 ",%4,%5,%6,%7"
#define TANDEM_D2 TANDEM_D1 ",%8,%9,%10,%11"
#define TANDEM_D3 TANDEM_D2 ",%12,%13,%14,%15"
#define TANDEM_D4 TANDEM_D3 ",%16,%17,%18,%19"
#define TANDEM_D5 TANDEM_D4 ",%20,%21,%22,%23"
#define TANDEM_D6 TANDEM_D5 ",%24,%25,%26,%27"
#define TANDEM_D7 TANDEM_D6 ",%28,%29,%30,%31"
#define TANDEM_D8 TANDEM_D7 ",%32,%33,%34,%35"
#define TANDEM_D9 TANDEM_D8 ",%36,%37,%38,%39"
#define TANDEM_D10 TANDEM_D9 ",%40,%41,%42,%43"
#define TANDEM_D11 TANDEM_D10 ",%44,%45,%46,%47"
#define TANDEM_D12 TANDEM_D11 ",%48,%49,%50,%51"
#define TANDEM_D13 TANDEM_D12 ",%52,%53,%54,%55"
#define TANDEM_D14 TANDEM_D13 ",%56,%57,%58,%59"
#define TANDEM_D15 TANDEM_D14 ",%60,%61,%62,%63"
#define TANDEM_D16 TANDEM_D15 ",%64,%65,%66,%67"
#define TANDEM_D17 TANDEM_D16 ",%68,%69,%70,%71"
#define TANDEM_D18 TANDEM_D17 ",%72,%73,%74,%75"
#define TANDEM_D19 TANDEM_D18 ",%76,%77,%78,%79"
#define TANDEM_D20 TANDEM_D19 ",%80,%81,%82,%83"
#define TANDEM_D21 TANDEM_D20 ",%84,%85,%86,%87"
#define TANDEM_F(i) "+f"(d[4 * i]), "+f"(d[4 * i + 1]), "+f"(d[4 * i + 2]), "+f"(d[4 * i + 3])
#define TANDEM_F0 TANDEM_F(0)
#define TANDEM_F1 TANDEM_F0, TANDEM_F(1)
#define TANDEM_F2 TANDEM_F1, TANDEM_F(2)
#define TANDEM_F3 TANDEM_F2, TANDEM_F(3)
#define TANDEM_F4 TANDEM_F3, TANDEM_F(4)
#define TANDEM_F5 TANDEM_F4, TANDEM_F(5)
#define TANDEM_F6 TANDEM_F5, TANDEM_F(6)
#define TANDEM_F7 TANDEM_F6, TANDEM_F(7)
#define TANDEM_F8 TANDEM_F7, TANDEM_F(8)
#define TANDEM_F9 TANDEM_F8, TANDEM_F(9)
#define TANDEM_F10 TANDEM_F9, TANDEM_F(10)
#define TANDEM_F11 TANDEM_F10, TANDEM_F(11)
#define TANDEM_F12 TANDEM_F11, TANDEM_F(12)
#define TANDEM_F13 TANDEM_F12, TANDEM_F(13)
#define TANDEM_F14 TANDEM_F13, TANDEM_F(14)
#define TANDEM_F15 TANDEM_F14, TANDEM_F(15)
#define TANDEM_F16 TANDEM_F15, TANDEM_F(16)
#define TANDEM_F17 TANDEM_F16, TANDEM_F(17)
#define TANDEM_F18 TANDEM_F17, TANDEM_F(18)
#define TANDEM_F19 TANDEM_F18, TANDEM_F(19)
#define TANDEM_F20 TANDEM_F19, TANDEM_F(20)
#define TANDEM_F21 TANDEM_F20, TANDEM_F(21)
#define TANDEM_PRODUCT(N, LAST, A, B)                                                                                                \
  template <>                                                                                                                 \
  __device__ __forceinline__ void product<N>(float (&d)[N / 2], uint64_t a, uint64_t b) {                                     \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 1, 1;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TANDEM_D##LAST \
                 "}, %" #A ", %" #B ", p, 1, 1;\n}"                                                                           \
                 : TANDEM_F##LAST                                                                                                    \
                 : "l"(a), "l"(b));                                                                                           \
  }
TANDEM_PRODUCT(16, 1, 8, 9)
TANDEM_PRODUCT(32, 3, 16, 17)
TANDEM_PRODUCT(48, 5, 24, 25)
TANDEM_PRODUCT(64, 7, 32, 33)
TANDEM_PRODUCT(72, 8, 36, 37)
TANDEM_PRODUCT(80, 9, 40, 41)
TANDEM_PRODUCT(88, 10, 44, 45)
TANDEM_PRODUCT(96, 11, 48, 49)
TANDEM_PRODUCT(104, 12, 52, 53)
TANDEM_PRODUCT(112, 13, 56, 57)
TANDEM_PRODUCT(120, 14, 60, 61)
TANDEM_PRODUCT(128, 15, 64, 65)
TANDEM_PRODUCT(136, 16, 68, 69)
TANDEM_PRODUCT(144, 17, 72, 73)
TANDEM_PRODUCT(152, 18, 76, 77)
TANDEM_PRODUCT(160, 19, 80, 81)
TANDEM_PRODUCT(168, 20, 84, 85)
TANDEM_PRODUCT(176, 21, 88, 89)
#undef TANDEM_PRODUCT

// Describes `matrices` row-major matrices of bytes to the copy engine, which takes boxes of 128 columns and `box_rows` rows from one of them;
// what lies outside reads as zero. `base` and `row_bytes` are multiples of 16. Returns: 0 or an error.
inline int describe_rows(CUtensorMap* map, const void* base, int columns, int rows, int matrices, int box_rows) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) entry = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  if (encode == nullptr) return static_cast<int>(cudaErrorNotSupported);
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[2] = {sizes[0], sizes[0] * sizes[1]};
  const cuuint32_t box[3] = {128, static_cast<cuuint32_t>(box_rows), 1}, steps[3] = {1, 1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<int>(result);
}
#endif
