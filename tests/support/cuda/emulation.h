// Runs the decode kernels' own source on a CPU: one fiber per CUDA thread, blocks one after the other, warp operations and block barriers
// as rendezvous. Ranks that meet are threads of the process, each with its own emulation. It checks indexing, layouts, masks and reduction order, not speed and not races between blocks. Shared memory starts as NaN.
#pragma once
#include <sched.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __grid_constant__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __restrict__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) unsigned char* name = emulation::dynamic_shared()

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {
struct LaneInput { uint32_t words[8]; };
struct Warp {
  LaneInput slots[2][32];
  int arrived = 0;
  uint64_t generation = 0;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  unsigned thread, rank;  // within its block, of its block within the cluster
  bool done;
};
struct Gate {
  int live = 0, at_barrier = 0;
  uint64_t generation = 0;
};
// The blocks of one cluster, mostly one: those take turns fiber by fiber.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;  // 32 a block
  std::vector<Gate> gates;
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::function<void()> body;
};
inline Block*& block() { static thread_local Block* b = nullptr; return b; }
inline dim3& grid_dim() { static thread_local dim3 d; return d; }
inline dim3& block_dim() { static thread_local dim3 d; return d; }
inline dim3& block_index() { static thread_local dim3 d; return d; }
inline std::vector<std::vector<unsigned char>>& shared_bytes() { static thread_local std::vector<std::vector<unsigned char>> v; return v; }
inline unsigned char* dynamic_shared(unsigned rank) {
  auto p = reinterpret_cast<uintptr_t>(shared_bytes()[rank].data());
  return reinterpret_cast<unsigned char*>((p + 1023) / 1024 * 1024);
}
inline unsigned char* dynamic_shared() { return dynamic_shared(block()->current->rank); }
inline void yield() { swapcontext(&block()->current->context, &block()->scheduler); }
inline void fiber_main() {
  block()->body();
  block()->current->done = true;
  block()->gates[block()->current->rank].live--;
  swapcontext(&block()->current->context, &block()->scheduler);
}
inline const LaneInput* exchange(const LaneInput& input) {
  Block* b = block();
  Warp& warp = b->warps[b->current->rank * 32 + b->current->thread / 32];
  const uint64_t generation = warp.generation;
  warp.slots[generation & 1][b->current->thread % 32] = input;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    warp.generation++;
  } else {
    while (warp.generation == generation) yield();
  }
  return warp.slots[generation & 1];
}
inline void run(dim3 grid, int threads, int shared, const std::function<void()>& body, unsigned cluster = 1) {
  const int all = threads * cluster;
  Block b;
  b.body = body;
  b.fibers.resize(all);
  for (auto& fiber : b.fibers) fiber.stack.reset(new char[256 * 1024]);
  block() = &b;
  grid_dim() = grid;
  block_dim() = dim3(threads);
  for (unsigned z = 0; z < grid.z; z++)
    for (unsigned y = 0; y < grid.y; y++)
      for (unsigned x = 0; x < grid.x; x += cluster) {
        shared_bytes().assign(cluster, std::vector<unsigned char>(shared + 1024, 0xFF));
        b.warps.assign(32 * cluster, Warp());
        b.gates.assign(cluster, Gate());
        for (int t = 0; t < all; t++) {
          Fiber& fiber = b.fibers[t];
          fiber.thread = t % threads;
          fiber.rank = t / threads;
          fiber.done = false;
          b.gates[fiber.rank].live++;
          getcontext(&fiber.context);
          fiber.context.uc_stack.ss_sp = fiber.stack.get();
          fiber.context.uc_stack.ss_size = 256 * 1024;
          fiber.context.uc_link = nullptr;
          makecontext(&fiber.context, reinterpret_cast<void (*)()>(fiber_main), 0);
        }
        const int first = (x * 37 + y * 11) % threads;  // each block in an order of its own: what atomics decide must not differ
        for (bool is_live = true; is_live;) {
          is_live = false;
          for (int i = 0; i < all; i++) {
            Fiber& fiber = b.fibers[(first + i) % all];
            if (fiber.done) continue;
            is_live = true;
            b.current = &fiber;
            block_index() = dim3(x + fiber.rank, y, z);
            swapcontext(&b.scheduler, &fiber.context);
          }
        }
      }
}
struct ThreadIndex {
  struct { operator unsigned() const { return block()->current->thread; } } x;
};
struct GridValue {
  dim3& (*source)();
};
}  // namespace emulation

static emulation::ThreadIndex threadIdx;
#define blockIdx (emulation::block_index())
#define gridDim (emulation::grid_dim())
#define blockDim (emulation::block_dim())

inline void __syncthreads() {
  emulation::Gate& gate = emulation::block()->gates[emulation::block()->current->rank];
  const uint64_t generation = gate.generation;
  if (++gate.at_barrier == gate.live) {
    gate.at_barrier = 0;
    gate.generation++;
  } else {
    while (gate.generation == generation) emulation::yield();
  }
}
inline int __syncthreads_or(int x) {
  static thread_local int value[2];
  static thread_local int turn = 0;
  __syncthreads();
  if (threadIdx.x == 0) { turn ^= 1; value[turn] = 0; }
  __syncthreads();
  value[turn] |= x != 0;
  __syncthreads();
  return value[turn];
}
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { emulation::exchange({}); }
inline void __threadfence() {}
inline void __threadfence_system() {}

inline float __uint_as_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t x; memcpy(&x, &f, 4); return x; }
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  emulation::LaneInput in = {};
  memcpy(in.words, &value, sizeof(T));
  const auto* all = emulation::exchange(in);
  T out;
  memcpy(&out, all[(threadIdx.x % 32) ^ mask].words, sizeof(T));
  return out;
}
template <typename T>
inline T __shfl_sync(unsigned, T value, int lane) {
  emulation::LaneInput in = {};
  memcpy(in.words, &value, sizeof(T));
  const auto* all = emulation::exchange(in);
  T out;
  memcpy(&out, all[lane & 31].words, sizeof(T));
  return out;
}
template <typename T>
inline T __shfl_up_sync(unsigned, T value, int delta) {
  emulation::LaneInput in = {};
  memcpy(in.words, &value, sizeof(T));
  const auto* all = emulation::exchange(in);
  const int lane = threadIdx.x % 32;
  T out;
  memcpy(&out, all[lane >= delta ? lane - delta : lane].words, sizeof(T));
  return out;
}
inline uint32_t __ballot_sync(unsigned, int predicate) {
  emulation::LaneInput in = {};
  in.words[0] = predicate != 0;
  const auto* all = emulation::exchange(in);
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= all[i].words[0] << i;
  return bits;
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  emulation::LaneInput in = {};
  in.words[0] = value;
  const auto* all = emulation::exchange(in);
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= all[i].words[0];
  return bits;
}
inline int __reduce_add_sync(unsigned, int value) {
  emulation::LaneInput in = {};
  in.words[0] = static_cast<uint32_t>(value);
  const auto* all = emulation::exchange(in);
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += static_cast<int>(all[i].words[0]);
  return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
  emulation::LaneInput in = {};
  in.words[0] = static_cast<uint32_t>(value);
  const auto* all = emulation::exchange(in);
  for (int i = 0; i < 32; i++) value = std::max(value, static_cast<int>(all[i].words[0]));
  return value;
}
inline int __reduce_min_sync(unsigned mask, int value) { return ~__reduce_max_sync(mask, ~value); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
template <typename T>
inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
template <typename T>
inline T atomicMax(T* p, T v) { T old = *p; *p = std::max(old, v); return old; }
template <typename T>
inline T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
template <typename T>
inline T atomicCAS(T* p, T expected, T v) { T old = *p; if (old == expected) *p = v; return old; }
inline void add_release(int32_t* counter, int32_t value) { *counter += value; }
inline void store_release_system(uint32_t* p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }
inline uint32_t load_acquire_system(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline int32_t load_relaxed(const int32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline long long time_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
template <int REGISTERS>
inline void take_registers() {}
template <int REGISTERS>
inline void leave_registers() {}
inline void let_others_run() {
  sched_yield();
  emulation::yield();
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t s) {
  const uint64_t both = (static_cast<uint64_t>(y) << 32) | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++) out |= static_cast<uint32_t>((both >> (8 * ((s >> (4 * i)) & 7))) & 0xFF) << (8 * i);
  return out;
}
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::max;
using std::min;

inline uint16_t emulated_bf16(float f) {
  uint32_t x = __float_as_uint(f);
  if (std::isnan(f)) return static_cast<uint16_t>((x >> 16) | 0x40);
  return static_cast<uint16_t>((x + 0x7FFF + ((x >> 16) & 1)) >> 16);
}
inline float emulated_float(uint32_t bits) { return __uint_as_float(bits << 16); }
inline uint32_t bf16x2_pack(float low, float high) { return emulated_bf16(low) | (static_cast<uint32_t>(emulated_bf16(high)) << 16); }
inline uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
  return bf16x2_pack(emulated_float(a & 0xFFFF) * emulated_float(b & 0xFFFF), emulated_float(a >> 16) * emulated_float(b >> 16));
}
inline uint32_t rotate_left(uint32_t x, int n) { return n == 0 ? x : (x << n) | (x >> (32 - n)); }

inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulation::LaneInput in = {{a0, a1, a2, a3, b0, b1, 0, 0}};
  const auto* all = emulation::exchange(in);
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  for (int i = 0; i < 4; i++) {
    const int column = 2 * c + (i & 1);
    float sum = d[i];
    for (int k = 0; k < 16; k++) {
      const int owner = (k % 8) / 2, word = 2 * (k / 8) + (i >= 2 ? 1 : 0);
      const uint32_t a = all[4 * g + owner].words[word], b = all[4 * column + owner].words[4 + k / 8];
      sum += emulated_float((a >> (16 * (k & 1))) & 0xFFFF) * emulated_float((b >> (16 * (k & 1))) & 0xFFFF);
    }
    d[i] = sum;
  }
}

inline void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  emulation::LaneInput in = {{a0, a1, a2, a3, b0, b1, 0, 0}};
  const auto* all = emulation::exchange(in);
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  for (int i = 0; i < 4; i++) {
    const int column = 2 * c + (i & 1);
    for (int k = 0; k < 32; k++) {
      const int owner = k % 16 / 4, byte = k % 4, word = 2 * (k / 16) + (i >= 2 ? 1 : 0);
      const int a = static_cast<int8_t>(all[4 * g + owner].words[word] >> (8 * byte));
      d[i] += a * static_cast<int8_t>(all[4 * column + owner].words[4 + k / 16] >> (8 * byte));
    }
  }
}

inline void copy_async_16(void* shared, const void* global) { memcpy(shared, global, 16); }
inline void copy_async_commit() {}
template <int PENDING>
inline void copy_async_wait() {}
// Low half: completed phases. High half: arrivals of a phase, and how many of this one are missing.
inline void barrier_init(uint64_t* barrier, int arrivals) {
  *barrier = static_cast<uint64_t>(arrivals) << 48 | static_cast<uint64_t>(arrivals) << 32;
}
inline void barrier_arrive(uint64_t* barrier) {
  *barrier -= 1ull << 32;
  if ((*barrier >> 32 & 0xFFFF) == 0) *barrier += (*barrier >> 48 << 32) + 1;
}
inline void wait_for_count(const int32_t* counter, int count) {
  if (*counter < count) abort();  // blocks run one after the other: nothing to wait for
}
inline void barrier_init_fence() {}
inline void copy_bulk(void* shared, const void* global, int bytes, uint64_t* barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16 || reinterpret_cast<uintptr_t>(shared) % 16) abort();
  memcpy(shared, global, bytes);
  barrier_arrive(barrier);
}
// Carried out at once, so that a stage that is overwritten too early is seen in the target.
inline void store_bulk(void* global, const void* shared, int bytes) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(global) % 16 || reinterpret_cast<uintptr_t>(shared) % 16) abort();
  memcpy(global, shared, bytes);
}
inline void store_bulk_commit() {}
template <int PENDING>
inline void store_bulk_wait_read() {}
template <int PENDING>
inline void store_bulk_wait() {}
inline void prefetch_bulk(const void*, int) {}
inline void copy_async_arrive(uint64_t* barrier) { barrier_arrive(barrier); }
// Completed phases are counted; phase parity p has passed when the current phase's parity differs from p.
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while ((*barrier & 1) == parity) emulation::yield();
}
inline void wait_for_previous_kernel() {}
inline void start_next_kernel() {}
inline uint4 load_global_16(const void* p) { uint4 v; memcpy(&v, p, 16); return v; }
inline uint4 load_stream_16(const void* p) { return load_global_16(p); }
template <typename T>
inline T __ldcg(const T* p) { return *p; }
template <typename T>
inline T __ldg(const T* p) { return *p; }

template <typename... Formal, typename... Actual>
int launch(void (*kernel)(Formal...), dim3 grid, int threads, int shared_bytes, void*, Actual... args) {
  emulation::run(grid, threads, shared_bytes, [&] { kernel(static_cast<Formal>(args)...); });
  return 0;
}
