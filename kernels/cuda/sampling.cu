// Greedy choice and sampling over the vocabulary's logits. Masses are added as integers: the order of additions can't change a token.
#include "sampling.cuh"

namespace {

constexpr int kThreads = 1024, kBins = 2048;

struct SampleArgs {
  const float* logits;           // [rows, vocab]
  const float* temperature;      // [rows], 0 for greedy
  const int32_t* top_k;          // [rows], 0 for off
  const float* top_p;            // [rows], 1 for off
  const float* min_p;            // [rows], 0 for off
  const long long* seed;         // [rows]
  const int32_t* seq_lens;       // [rows]: position of the new token; 0 for a padded row
  int32_t* tokens;               // [rows]: token id, or -1 when a logit is NaN or infinite
  float* best;                   // [rows, parts] scratch; in the end a row's largest logit, then what its sampled token won with
  int32_t* best_id;              // [rows, parts]
  int32_t* arrived;              // [rows], zero before and after
  int vocab, stride;             // of best and best_id
  int keep_greedy;               // rows without a temperature keep their token
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

__device__ __forceinline__ Best candidate(float x, int id) { return fabsf(x) <= 3.0e38f ? Best{x, id} : Best{INFINITY, -kNotFinite}; }

// grid (parts, rows): largest logit of a part; the block that comes last compares the parts. Rows with a temperature are left to
// `sample_row`, which takes the maximum from here.
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
  const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
  const int quads = a.vocab / 4, first = static_cast<int>(static_cast<long long>(quads) * blockIdx.x / parts);
  const int last = static_cast<int>(static_cast<long long>(quads) * (blockIdx.x + 1) / parts);
  Best mine = {-INFINITY, kNotFinite};
  constexpr int kTogether = 4;  // loads on their way at a time; what lies past the end repeats the last
  for (int base = first + threadIdx.x; base < last; base += kTogether * blockDim.x) {
    uint4 v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) v[j] = load_global_16(logits + 4 * min(base + j * static_cast<int>(blockDim.x), last - 1));
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int id = 4 * min(base + j * static_cast<int>(blockDim.x), last - 1);
      mine = better(mine, candidate(__uint_as_float(v[j].x), id));
      mine = better(mine, candidate(__uint_as_float(v[j].y), id + 1));
      mine = better(mine, candidate(__uint_as_float(v[j].z), id + 2));
      mine = better(mine, candidate(__uint_as_float(v[j].w), id + 3));
    }
  }
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
    a.best[row * a.stride] = mine.value;
  }
}

// Finds the largest threshold key whose (count or mass) at or above it reaches `target`, 11 bits at a time; all keys >= `floor_key` count.
// MASS: weight exp((x - top) / temperature) as a 44-bit fraction, else 1.
template <bool MASS>
__device__ uint32_t select_key(const float* logits, int vocab, uint32_t floor_key, unsigned long long target, double share, float top,
                               float inverse, unsigned long long* bins, uint32_t* found, unsigned long long* rest) {
  uint32_t prefix = 0;
  for (int shift = 21; shift >= -1; shift -= 11) {
    const int bits = shift < 0 ? 10 : 11, low = shift < 0 ? 0 : shift;
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
      const float x = __ldcg(logits + i);
      const uint32_t key = to_key(x);
      if (key < floor_key || (low + bits < 32 && (key >> (low + bits)) != prefix)) continue;
      const unsigned long long weight = MASS ? static_cast<unsigned long long>(expf((x - top) * inverse) * 17592186044416.0f) : 1ull;
      atomicAdd(bins + (key >> low & ((1u << bits) - 1)), weight);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (MASS && shift == 21) {
        unsigned long long all = 0;
        for (int i = 0; i < kBins; i++) all += bins[i];
        target = static_cast<unsigned long long>(share * static_cast<double>(all));
        if (target == 0) target = 1;
      }
      int bin = (1 << bits) - 1;
      while (bin > 0 && bins[bin] < target) target -= bins[bin--];
      *found = static_cast<uint32_t>(bin);
      *rest = target;
    }
    __syncthreads();
    prefix = prefix << bits | *found;
    target = *rest;
    __syncthreads();
  }
  return prefix;
}

// grid (rows): filters (top-k, then top-p of what it left, then min-p), then the largest perturbed logit. Equal logits share a fate.
__global__ void __launch_bounds__(kThreads) sample_row(SampleArgs a) {
  __shared__ float values[32];
  __shared__ int ids[32];
  __shared__ unsigned long long bins[kBins];
  __shared__ uint32_t found;
  __shared__ unsigned long long rest;
  const int row = blockIdx.x;
  wait_for_previous_kernel();
  start_next_kernel();
  const float temperature = __ldg(a.temperature + row);
  if (__ldg(a.seq_lens + row) == 0 || temperature <= 0.0f || __ldcg(a.tokens + row) == kBadLogits) return;
  const float* logits = a.logits + static_cast<size_t>(row) * a.vocab;
  const float inverse = 1.0f / temperature, top = __ldcg(a.best + row * a.stride);
  const float min_p = __ldg(a.min_p + row), top_p = __ldg(a.top_p + row);
  const int top_k = __ldg(a.top_k + row);
  uint32_t floor_key = 0;
  if (top_k > 0 && top_k < a.vocab) {
    const uint32_t key = select_key<false>(logits, a.vocab, 0, top_k, 0.0, top, inverse, bins, &found, &rest);
    floor_key = max(floor_key, key);
  }
  if (top_p < 1.0f) {
    const uint32_t key = select_key<true>(logits, a.vocab, floor_key, 0, top_p, top, inverse, bins, &found, &rest);
    floor_key = max(floor_key, key);
  }
  if (min_p > 0.0f) floor_key = max(floor_key, to_key(top + logf(min_p) * temperature));
  const Draw draw = draw_of(temperature, __ldg(a.seed + row), __ldg(a.seq_lens + row));
  Best mine = {-INFINITY, kNotFinite};
  for (int i = threadIdx.x; i < a.vocab; i += blockDim.x) {
    const float x = __ldcg(logits + i);
    if (to_key(x) >= floor_key) mine = better(mine, {perturbed(draw, x, i), i});
  }
  mine = block_best(mine, values, ids);
  if (threadIdx.x == 0) a.tokens[row] = mine.id, a.best[row * a.stride + 1] = mine.value;
}

}  // namespace

extern "C" int tandem_sample(const void* logits, const void* temperature, const void* top_k, const void* top_p, const void* min_p,
                             const void* seed, const void* seq_lens, void* tokens, void* best, void* best_id, void* arrived, int rows,
                             int vocab, int parts, int all_greedy, int keep_greedy, void* stream) {
  if (vocab % 4) return -1;
  const SampleArgs a = {static_cast<const float*>(logits), static_cast<const float*>(temperature), static_cast<const int32_t*>(top_k),
                        static_cast<const float*>(top_p), static_cast<const float*>(min_p), static_cast<const long long*>(seed),
                        static_cast<const int32_t*>(seq_lens), static_cast<int32_t*>(tokens), static_cast<float*>(best),
                        static_cast<int32_t*>(best_id), static_cast<int32_t*>(arrived), vocab, parts, keep_greedy};
  if (rows >= 16 && parts > 16) parts = 16;  // there are blocks enough: fewer that do more each
  const int status = launch(greedy, dim3(parts, rows), 256, 0, stream, a);
  if (status != 0 || all_greedy) return status;
  return launch(sample_row, dim3(rows), kThreads, 0, stream, a);
}
