// Greedy choice and sampling over the vocabulary's logits. Masses are added as integers: the order of additions can't change a token.
#include "sampling.cuh"

namespace {

constexpr int kThreads = 1024, kBins = 2048, kCopies = 8;  // of the bins: near logits share few bins, and additions to one wait for each other

struct SampleArgs {
  const float* logits;           // [rows, vocab]
  const float* temperature;      // [rows], 0 for greedy
  const int32_t* top_k;          // [rows], 0 for off
  const float* top_p;            // [rows], 1 for off
  const float* min_p;            // [rows], 0 for off
  const long long* seed;         // [rows]
  const int32_t* seq_lens;       // [rows]: position of the new token; 0 for a padded row
  int32_t* tokens;               // [rows]: token id, or -1 when a logit is NaN or infinite
  float* best;                   // [rows, parts] scratch; in the end a row's largest logit, or second what its sampled token won with
  int32_t* best_id;              // [rows, parts]
  int32_t* arrived;              // [rows], zero before and after
  int vocab, stride;             // of best and best_id
  int keep_greedy;               // rows without a temperature keep their token
  __device__ __forceinline__ bool is_filtered(int row) const {
    return has_filter(__ldg(temperature + row), __ldg(top_k + row), __ldg(top_p + row), __ldg(min_p + row), vocab);
  }
};

// Order-preserving map of floats to unsigned integers.
__device__ __forceinline__ uint32_t to_key(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
// The block's largest value, ties to the lower id; every thread gets it. `scratch` is 32 of each.
__device__ __forceinline__ Best block_best(Best mine, float* values, int* ids) {
  for (int step = 16; step > 0; step >>= 1)
    mine = better(mine, {__shfl_xor_sync(0xFFFFFFFFu, mine.value, step), __shfl_xor_sync(0xFFFFFFFFu, mine.id, step)});
  __syncthreads();
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = mine.value, ids[threadIdx.x / 32] = mine.id;
  __syncthreads();
  mine = {values[0], ids[0]};
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; w++) mine = better(mine, {values[w], ids[w]});
  return mine;
}

template <bool NOISY>
__device__ __forceinline__ Best candidate(const Draw& draw, float x, int id) {
  return fabsf(x) <= 3.0e38f ? Best{NOISY ? perturbed(draw, x, id) : x, id} : Best{INFINITY, -kNotFinite};
}

// A thread's best of every blockDim-th of four logits from `first` to `last`, both in fours.
template <bool NOISY>
__device__ __forceinline__ Best best_of(const Draw& draw, const float* logits, int first, int last) {
  Best mine = {-INFINITY, kNotFinite};
  constexpr int kTogether = 4;  // loads on their way at a time; what lies past the end repeats the last
  for (int base = first + threadIdx.x; base < last; base += kTogether * blockDim.x) {
    uint4 v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) v[j] = load_global_16(logits + 4 * min(base + j * static_cast<int>(blockDim.x), last - 1));
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int id = 4 * min(base + j * static_cast<int>(blockDim.x), last - 1);
      mine = better(mine, candidate<NOISY>(draw, __uint_as_float(v[j].x), id));
      mine = better(mine, candidate<NOISY>(draw, __uint_as_float(v[j].y), id + 1));
      mine = better(mine, candidate<NOISY>(draw, __uint_as_float(v[j].z), id + 2));
      mine = better(mine, candidate<NOISY>(draw, __uint_as_float(v[j].w), id + 3));
    }
  }
  return mine;
}

// grid (parts, rows): the best of a part, by logit or by logit / temperature + noise; the block that comes last compares the parts. Rows with
// a filter are left to `sample_row`, which takes the largest logit from here.
__global__ void __launch_bounds__(256) greedy(SampleArgs a) {
  __shared__ float values[32];
  __shared__ int ids[32];
  __shared__ int is_last;
  const int row = blockIdx.y, parts = gridDim.x;
  wait_for_previous_kernel();
  start_next_kernel();
  if (__ldg(a.seq_lens + row) == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) a.tokens[row] = 0;
    return;
  }
  const Draw draw = draw_of(a.is_filtered(row) ? 0.0f : __ldg(a.temperature + row), __ldg(a.seed + row), __ldg(a.seq_lens + row));
  const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
  const int quads = a.vocab / 4, first = static_cast<int>(static_cast<long long>(quads) * blockIdx.x / parts);
  const int last = static_cast<int>(static_cast<long long>(quads) * (blockIdx.x + 1) / parts);
  Best mine = draw.is_noisy ? best_of<true>(draw, logits, first, last) : best_of<false>(draw, logits, first, last);
  mine = block_best(mine, values, ids);
  if (threadIdx.x == 0) {
    a.best[row * a.stride + blockIdx.x] = mine.value;
    a.best_id[row * a.stride + blockIdx.x] = mine.id;
    __threadfence();
    is_last = atomicAdd(a.arrived + row, 1) == parts - 1;
    if (is_last) a.arrived[row] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  mine = {-INFINITY, kNotFinite};
  for (int i = threadIdx.x; i < parts; i += blockDim.x) mine = better(mine, {__ldcg(a.best + row * a.stride + i), __ldcg(a.best_id + row * a.stride + i)});
  mine = block_best(mine, values, ids);
  if (threadIdx.x == 0) {
    if (!a.keep_greedy || __ldg(a.temperature + row) > 0.0f) a.tokens[row] = mine.id < 0 ? kBadLogits : mine.id;
    a.best[row * a.stride + draw.is_noisy] = mine.value;
  }
}

// Calls f(id, logit) for all of a row, with 16 logits of a thread on their way at a time.
template <typename F>
__device__ __forceinline__ void each_logit(const float* logits, int vocab, F f) {
  constexpr int kTogether = 4;
  const int quads = vocab / 4, step = static_cast<int>(blockDim.x);
  for (int base = threadIdx.x; base < quads; base += kTogether * step) {
    uint4 v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) v[j] = load_global_16(logits + 4 * min(base + j * step, quads - 1));
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int quad = base + j * step;
      if (quad >= quads) break;
      f(4 * quad, __uint_as_float(v[j].x));
      f(4 * quad + 1, __uint_as_float(v[j].y));
      f(4 * quad + 2, __uint_as_float(v[j].z));
      f(4 * quad + 3, __uint_as_float(v[j].w));
    }
  }
}

// What a search for a threshold shares among the block's threads.
struct Search {
  unsigned long long warp_sums[kThreads / 32], total, rest;
  uint32_t found;
};

// The block's running sum over threads, own value included.
__device__ __forceinline__ unsigned long long running_sum(unsigned long long value, Search& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int delta = 1; delta < 32; delta <<= 1) {
    const unsigned long long before = __shfl_up_sync(0xFFFFFFFFu, value, delta);
    if (lane >= delta) value += before;
  }
  if (lane == 31) shared.warp_sums[warp] = value;
  __syncthreads();
  for (int w = 0; w < warp; w++) value += shared.warp_sums[w];
  if (threadIdx.x == kThreads - 1) shared.total = value;
  __syncthreads();
  return value;
}

// Finds the largest threshold key whose (count or mass) at or above it reaches `target`, 11 bits at a time; all keys >= `floor_key` count.
// MASS: weight exp((x - top) / temperature) as a 44-bit fraction, and the target is that share of all mass; else 1.
template <bool MASS>
__device__ uint32_t select_key(const float* logits, int vocab, uint32_t floor_key, unsigned long long target, double share, float top,
                               float inverse, unsigned long long* bins, Search& shared) {
  static_assert(kBins == 2 * kThreads, "a thread sums up two bins");
  uint32_t prefix = 0;
  unsigned long long* own = bins + threadIdx.x / 32 % kCopies * kBins;
  for (int shift = 21; shift >= -1; shift -= 11) {
    const int bits = shift < 0 ? 10 : 11, low = shift < 0 ? 0 : shift;
    for (int i = threadIdx.x; i < kCopies * kBins; i += kThreads) bins[i] = 0;
    __syncthreads();
    each_logit(logits, vocab, [&](int, float x) {
      const uint32_t key = to_key(x);
      if (key < floor_key || (low + bits < 32 && (key >> (low + bits)) != prefix)) return;
      const unsigned long long weight = MASS ? static_cast<unsigned long long>(expf((x - top) * inverse) * 17592186044416.0f) : 1ull;
      if (weight) atomicAdd(own + (key >> low & ((1u << bits) - 1)), weight);
    });
    __syncthreads();
    const int upper = kBins - 1 - 2 * static_cast<int>(threadIdx.x);  // falling bins over rising threads
    unsigned long long sums[2] = {0, 0};
    for (int copy = 0; copy < kCopies; copy++) sums[0] += bins[copy * kBins + upper], sums[1] += bins[copy * kBins + upper - 1];
    const unsigned long long through = running_sum(sums[0] + sums[1], shared), before = through - sums[0] - sums[1];
    if (MASS && shift == 21) {
      target = static_cast<unsigned long long>(share * static_cast<double>(shared.total));
      if (target == 0) target = 1;
    }
    if (before < target && (target <= through || upper == 1)) {
      const bool is_second = target > before + sums[0];
      shared.found = static_cast<uint32_t>(upper - is_second);
      shared.rest = target - before - (is_second ? sums[0] : 0);
    }
    __syncthreads();
    prefix = prefix << bits | shared.found;
    target = shared.rest;
    __syncthreads();
  }
  return prefix;
}

// grid (rows): filters (top-k, then top-p of what it left, then min-p), then the largest perturbed logit. Equal logits share a fate.
__global__ void __launch_bounds__(kThreads) sample_row(SampleArgs a) {
  DYNAMIC_SHARED(dynamic);
  unsigned long long* bins = reinterpret_cast<unsigned long long*>(dynamic);  // [kCopies][kBins]
  __shared__ float values[32];
  __shared__ int ids[32];
  __shared__ Search shared;
  const int row = blockIdx.x;
  wait_for_previous_kernel();
  start_next_kernel();
  if (__ldg(a.seq_lens + row) == 0 || !a.is_filtered(row) || __ldcg(a.tokens + row) == kBadLogits) return;
  const float temperature = __ldg(a.temperature + row);
  const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
  const Draw draw = draw_of(temperature, __ldg(a.seed + row), __ldg(a.seq_lens + row));
  const float top = __ldcg(a.best + row * a.stride);
  const float min_p = __ldg(a.min_p + row), top_p = __ldg(a.top_p + row);
  const int top_k = __ldg(a.top_k + row);
  uint32_t floor_key = 0;
  if (top_k > 0 && top_k < a.vocab)
    floor_key = max(floor_key, select_key<false>(logits, a.vocab, 0, top_k, 0.0, top, draw.inverse, bins, shared));
  if (top_p < 1.0f) floor_key = max(floor_key, select_key<true>(logits, a.vocab, floor_key, 0, top_p, top, draw.inverse, bins, shared));
  if (min_p > 0.0f) floor_key = max(floor_key, to_key(top + logf(min_p) * temperature));
  Best mine = {-INFINITY, kNotFinite};
  each_logit(logits, a.vocab, [&](int id, float x) {
    if (to_key(x) >= floor_key) mine = better(mine, {perturbed(draw, x, id), id});
  });
  mine = block_best(mine, values, ids);
  if (threadIdx.x == 0) a.tokens[row] = mine.id;
}

}  // namespace

extern "C" int tandem_sample(const void* logits, const void* temperature, const void* top_k, const void* top_p, const void* min_p,
                             const void* seed, const void* seq_lens, void* tokens, void* best, void* best_id, void* arrived, int rows,
                             int vocab, int parts, int unfiltered, int keep_greedy, void* stream) {
  if (vocab % 4) return -1;
  const SampleArgs a = {static_cast<const float*>(logits), static_cast<const float*>(temperature), static_cast<const int32_t*>(top_k),
                        static_cast<const float*>(top_p), static_cast<const float*>(min_p), static_cast<const long long*>(seed),
                        static_cast<const int32_t*>(seq_lens), static_cast<int32_t*>(tokens), static_cast<float*>(best),
                        static_cast<int32_t*>(best_id), static_cast<int32_t*>(arrived), vocab, parts, keep_greedy};
  if (rows >= 16 && parts > 16) parts = 16;  // there are blocks enough: fewer that do more each
  const int status = launch(greedy, dim3(parts, rows), 256, 0, stream, a);
  if (status != 0 || unfiltered) return status;
  return launch(sample_row, dim3(rows), kThreads, kCopies * kBins * 8, stream, a);
}
