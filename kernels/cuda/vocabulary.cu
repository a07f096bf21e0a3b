// The next words without reading all of the vocabulary's weights. `screen` multiplies an 8-bit copy of them and bounds every logit from
// above; `rescore` computes, from the bf16 weights, those few logits whose bound reaches the largest lower bound, noise and temperature
// counted. Every other one loses for certain, so the choice is that of all logits computed as `rescore` does it.
#include "sampling.cuh"

namespace {

constexpr int kWarps = 16, kStages = 8, kUnitBytes = 1024;  // a unit: 16 rows of 64 bytes, in the order of a warp's lanes
constexpr int kLevels = 32639;                              // the largest 16-bit value whose two digits are signed bytes
constexpr float kRoundings = 1.0f / 65536;                  // of `rescore`'s sums, as a share of both norms: 97 of 2^-24 each at 2,880 columns
constexpr int kNoFloor = -2147483647 - 1;

struct ScreenArgs {
  const uint16_t* x;           // [tokens, columns] bf16
  const unsigned char* codes;  // [tiles, columns / 64, kUnitBytes] int8
  const float4* terms;         // [words]: scale of the codes; norm of what they miss; norm of the weights
  const float* temperature;    // [tokens], 0 for greedy
  const long long* seed;       // [tokens]
  const int32_t* seq_lens;     // [tokens]
  float* bounds;               // [tokens, words]: no logit lies above
  int32_t* floors;             // [tokens] in the order of floats: raised to the largest lower bound of what is chosen by
  int tokens, columns, words, tiles;
};

struct Token {
  float scale, norm, missed;  // of its 16-bit form; of itself; of what that form misses
  Draw draw;
};

__device__ __forceinline__ uint32_t four_bytes(int a, int b, int c, int d) {
  return (a & 0xFF) | (b & 0xFF) << 8 | (c & 0xFF) << 16 | static_cast<uint32_t>(d & 0xFF) << 24;
}

// One warp turns a token into 16-bit values of two signed digits, each at the place of a product's B operand: `high` and `low` of a unit
// are 32 lanes of 16 bytes, token `n`'s four lanes hold 16 columns each.
__device__ __forceinline__ Token split_token(const uint16_t* x, int columns, unsigned char* digits, int n) {
  const int lane = threadIdx.x % 32, pieces = columns / 8;
  float most = 0.0f, squares = 0.0f;
  for (int i = lane; i < pieces; i += 32) {
    const uint4 v = load_global_16(x + 8 * i);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float low = bf16_low(words[j]), high = bf16_high(words[j]);
      most = fmaxf(most, fmaxf(fabsf(low), fabsf(high)));
      squares += low * low + high * high;
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, step));
  squares = warp_sum(squares);
  const bool is_finite = squares <= 3.0e38f;
  const bool is_tiny = is_finite && most < 1e-30f;  // too small for its inverse: its 16-bit form misses all of it
  const float inverse = is_finite && !is_tiny ? kLevels / most : 0.0f;
  for (int i = lane; i < pieces; i += 32) {
    const uint4 v = load_global_16(x + 8 * i);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    int high[8], low[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float value = j % 2 ? bf16_high(words[j / 2]) : bf16_low(words[j / 2]);
      const int q = is_finite ? __float2int_rn(value * inverse) : 0;
      high[j] = (q + 128) >> 8;
      low[j] = q - 256 * high[j];
    }
    unsigned char* at = digits + i / 8 * kUnitBytes + (n * 4 + i % 8 / 2) * 16 + i % 2 * 8;
    *reinterpret_cast<uint2*>(at) = make_uint2(four_bytes(high[0], high[1], high[2], high[3]), four_bytes(high[4], high[5], high[6], high[7]));
    *reinterpret_cast<uint2*>(at + 512) = make_uint2(four_bytes(low[0], low[1], low[2], low[3]), four_bytes(low[4], low[5], low[6], low[7]));
  }
  if (is_tiny) return {0.0f, 0.0f, 1e-30f * sqrtf(static_cast<float>(columns)), {}};
  const float scale = is_finite ? most / kLevels : INFINITY - INFINITY;
  return {scale, sqrtf(squares), 0.51f * scale * sqrtf(static_cast<float>(columns)), {}};
}

// One block an SM. Every warp takes tiles of 16 words by itself; its weights come through a ring of its own, so nobody waits for anybody.
template <int NT>
__global__ void __launch_bounds__(kWarps * 32) screen(ScreenArgs a) {
  DYNAMIC_SHARED(shared);
  __shared__ Token tokens[8 * NT];
  __shared__ int floors[8 * NT];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4, units = a.columns / 64;
  unsigned char* ring = shared + warp * kStages * kUnitBytes + lane * 16;
  unsigned char* digits = shared + kWarps * kStages * kUnitBytes;  // [NT][units][high, low][32 lanes][16]

  const int first_tile = blockIdx.x * kWarps + warp, all_warps = gridDim.x * kWarps;
  const unsigned char* next = a.codes + static_cast<size_t>(first_tile) * units * kUnitBytes + lane * 16;
  int ask_tile = first_tile, ask_unit = 0;
  auto ask = [&](int slot) {
    if (ask_tile < a.tiles) {
      copy_async_16(ring + slot * kUnitBytes, next);
      copy_async_16(ring + slot * kUnitBytes + 512, next + 512);
      next += kUnitBytes;
    }
    copy_async_commit();
    if (++ask_unit == units) {
      ask_unit = 0;
      ask_tile += all_warps;
      next += static_cast<size_t>(all_warps - 1) * units * kUnitBytes;
    }
  };
#pragma unroll
  for (int i = 0; i < kStages; i++) ask(i);

  wait_for_previous_kernel();
  start_next_kernel();
  for (int n = warp; n < 8 * NT; n += kWarps) {
    Token token = {};
    unsigned char* mine = digits + static_cast<size_t>(n / 8) * units * kUnitBytes;
    if (n < a.tokens) {
      token = split_token(a.x + static_cast<size_t>(n) * a.columns, a.columns, mine, n % 8);
      token.draw = draw_of(__ldg(a.temperature + n), __ldg(a.seed + n), __ldg(a.seq_lens + n));
    } else {
      for (int i = lane; i < units * 8; i += 32)
        *reinterpret_cast<uint4*>(mine + i / 8 * kUnitBytes + i % 8 / 4 * 512 + (n % 8 * 4 + i % 4) * 16) = make_uint4(0, 0, 0, 0);
    }
    if (lane == 0) tokens[n] = token, floors[n] = kNoFloor;
  }
  __syncthreads();

  Token mine[NT][2];  // of the two tokens whose sums this lane ends up with
  float least[NT][2];
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int i = 0; i < 2; i++) mine[nt][i] = tokens[nt * 8 + 2 * c + i], least[nt][i] = -INFINITY;

  int slot = 0;
  for (int tile = first_tile; tile < a.tiles; tile += all_warps) {
    const int word = tile * 16 + g;
    const float4 none = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float4 terms[2] = {word < a.words ? __ldg(a.terms + word) : none, word + 8 < a.words ? __ldg(a.terms + word + 8) : none};
    int high[NT][4] = {}, low[NT][4] = {};
#pragma unroll 4
    for (int unit = 0; unit < units; unit++) {
      copy_async_wait<kStages - 1>();
      const uint4 top = *reinterpret_cast<const uint4*>(ring + slot * kUnitBytes);
      const uint4 bottom = *reinterpret_cast<const uint4*>(ring + slot * kUnitBytes + 512);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        const unsigned char* digit = digits + (nt * units + unit) * kUnitBytes + lane * 16;
        const uint4 h = *reinterpret_cast<const uint4*>(digit), l = *reinterpret_cast<const uint4*>(digit + 512);
        mma_s8(high[nt], top.x, bottom.x, top.y, bottom.y, h.x, h.y);
        mma_s8(low[nt], top.x, bottom.x, top.y, bottom.y, l.x, l.y);
        mma_s8(high[nt], top.z, bottom.z, top.w, bottom.w, h.z, h.w);
        mma_s8(low[nt], top.z, bottom.z, top.w, bottom.w, l.z, l.w);
      }
      ask(slot);
      slot = (slot + 1) % kStages;
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int i = 0; i < 4; i++) {  // rows g and g + 8, tokens 2 c and 2 c + 1
        const int n = nt * 8 + 2 * c + i % 2, at = word + i / 2 * 8;
        if (n >= a.tokens || at >= a.words) continue;
        const Token& t = mine[nt][i % 2];
        const float4& w = terms[i / 2];
        const float value = w.x * t.scale * fmaf(256.0f, static_cast<float>(high[nt][i]), static_cast<float>(low[nt][i]));
        const float off = 1.001f * (w.y * t.norm + w.z * t.missed) + kRoundings * w.z * t.norm + fabsf(value) * (1.0f / 1048576);
        a.bounds[static_cast<size_t>(n) * a.words + at] = value + off;
        least[nt][i % 2] = fmaxf(least[nt][i % 2], perturbed(t.draw, value - off, at));
      }
  }

#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float best = least[nt][i];
      for (int step = 4; step < 32; step <<= 1) best = fmaxf(best, __shfl_xor_sync(0xFFFFFFFFu, best, step));
      if (g == 0) atomicMax(floors + nt * 8 + 2 * c + i, order_of(best));
    }
  __syncthreads();
  if (threadIdx.x < a.tokens) atomicMax(a.floors + threadIdx.x, floors[threadIdx.x]);
}

struct RescoreArgs {
  const uint16_t* x;         // [tokens, columns] bf16
  const uint16_t* weights;   // [words, columns] bf16
  const float* bounds;       // [tokens, words]
  int32_t* floors;           // [tokens] or null: then what won over `bounds`, less what twice `slack` times the token's norm makes of it
  const float* temperature;  // [tokens], 0 for greedy
  const int32_t* top_k;      // [tokens], as the two that follow: rows with a filter are left alone
  const float* top_p;
  const float* min_p;
  const long long* seed;     // [tokens]
  const int32_t* seq_lens;   // [tokens], 0 for a padded row
  int32_t* tokens;           // [tokens] out: word, or -1 when a bound is NaN or infinite
  float* best;               // [tokens, stride]: what won in, by logit and by noise; first of a row out: what the word is chosen by
  float* part_best;          // [tokens, parts] scratch
  int32_t* part_id;
  int32_t* arrived;          // [tokens], zero before and after
  int columns, words, stride;
  float slack;
};

__device__ __forceinline__ Best warp_best(Best mine) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1)
    mine = better(mine, {__shfl_xor_sync(0xFFFFFFFFu, mine.value, step), __shfl_xor_sync(0xFFFFFFFFu, mine.id, step)});
  return mine;
}

// One warp: the logit of a word, and the square sum of `x`, in an order that hangs on nothing but the number of columns.
__device__ __forceinline__ float dot(const uint16_t* x, const uint16_t* w, int columns) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < columns / 8; i += 32) {
    const uint4 p = load_global_16(x + 8 * i), q = load_global_16(w + 8 * i);
    sum = fmaf(bf16_low(p.x), bf16_low(q.x), sum);
    sum = fmaf(bf16_high(p.x), bf16_high(q.x), sum);
    sum = fmaf(bf16_low(p.y), bf16_low(q.y), sum);
    sum = fmaf(bf16_high(p.y), bf16_high(q.y), sum);
    sum = fmaf(bf16_low(p.z), bf16_low(q.z), sum);
    sum = fmaf(bf16_high(p.z), bf16_high(q.z), sum);
    sum = fmaf(bf16_low(p.w), bf16_low(q.w), sum);
    sum = fmaf(bf16_high(p.w), bf16_high(q.w), sum);
  }
  return warp_sum(sum);
}

constexpr int kRescoreThreads = 256;

// grid (parts, rows): candidates of a part of the vocabulary, a warp for each; the block that comes last compares the parts.
__global__ void __launch_bounds__(kRescoreThreads) rescore(RescoreArgs a) {
  DYNAMIC_SHARED(shared);
  int* candidates = reinterpret_cast<int*>(shared);  // room for all of the part
  __shared__ float values[kRescoreThreads / 32];
  __shared__ int ids[kRescoreThreads / 32];
  __shared__ int count, is_bad, is_last;
  const int row = blockIdx.y, parts = gridDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) count = 0, is_bad = 0;
  wait_for_previous_kernel();
  start_next_kernel();
  if (__ldg(a.seq_lens + row) == 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      a.tokens[row] = 0;
      if (a.floors) a.floors[row] = kNoFloor;
    }
    return;
  }
  const float temperature = __ldg(a.temperature + row);
  if (has_filter(temperature, __ldg(a.top_k + row), __ldg(a.top_p + row), __ldg(a.min_p + row), a.words)) return;
  const Draw draw = draw_of(temperature, __ldg(a.seed + row), __ldg(a.seq_lens + row));
  const uint16_t* x = a.x + static_cast<size_t>(row) * a.columns;
  float floor;
  if (a.floors) {
    floor = float_from_order(__ldcg(a.floors + row));
  } else {
    const float won = __ldcg(a.best + static_cast<size_t>(row) * a.stride + draw.is_noisy);
    floor = won - 2.0f * a.slack * sqrtf(dot(x, x, a.columns)) * draw.inverse - fabsf(won) * (1.0f / 1048576);
  }
  __syncthreads();

  const float* bounds = a.bounds + static_cast<size_t>(row) * a.words;
  const int quads = a.words / 4, first = static_cast<int>(static_cast<long long>(quads) * blockIdx.x / parts);
  const int last = static_cast<int>(static_cast<long long>(quads) * (blockIdx.x + 1) / parts);
  constexpr int kTogether = 4;  // loads on their way at a time
  for (int base = first + threadIdx.x; base < last; base += kTogether * blockDim.x) {
    uint4 v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) v[j] = load_global_16(bounds + 4 * min(base + j * static_cast<int>(blockDim.x), last - 1));
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int quad = base + j * static_cast<int>(blockDim.x);
      if (quad >= last) break;
      const uint32_t words[4] = {v[j].x, v[j].y, v[j].z, v[j].w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float bound = __uint_as_float(words[i]);
        if (!(fabsf(bound) <= 3.0e38f)) is_bad = 1;
        if (perturbed(draw, bound, 4 * quad + i) >= floor) candidates[atomicAdd(&count, 1)] = 4 * quad + i;
      }
    }
  }
  __syncthreads();

  Best mine = {-INFINITY, kNotFinite};
  if (is_bad) {
    mine = {INFINITY, -kNotFinite};  // outranks every word and marks the row
  } else {
    for (int i = warp; i < count; i += kRescoreThreads / 32) {
      const int word = candidates[i];
      mine = better(mine, {perturbed(draw, dot(x, a.weights + static_cast<size_t>(word) * a.columns, a.columns), word), word});
    }
  }
  if (lane == 0) values[warp] = mine.value, ids[warp] = mine.id;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kRescoreThreads / 32; w++) mine = better(mine, {values[w], ids[w]});
    a.part_best[row * parts + blockIdx.x] = mine.value;
    a.part_id[row * parts + blockIdx.x] = mine.id;
    __threadfence();
    is_last = atomicAdd(a.arrived + row, 1) == parts - 1;
  }
  __syncthreads();
  if (!is_last || warp > 0) return;
  __threadfence();
  mine = {-INFINITY, kNotFinite};
  for (int i = lane; i < parts; i += 32) mine = better(mine, {__ldcg(a.part_best + row * parts + i), __ldcg(a.part_id + row * parts + i)});
  mine = warp_best(mine);
  if (lane == 0) {
    a.arrived[row] = 0;
    if (a.floors) a.floors[row] = kNoFloor;
    a.tokens[row] = mine.id < 0 ? kBadLogits : mine.id;
    a.best[static_cast<size_t>(row) * a.stride] = mine.value;
  }
}

}  // namespace

extern "C" int tandem_screen(const void* x, const void* codes, const void* terms, const void* temperature, const void* seed,
                             const void* seq_lens, void* bounds, void* floors, int tokens, int columns, int words, int blocks, void* stream) {
  if (tokens > 16 || columns % 64) return -1;
  const ScreenArgs a = {static_cast<const uint16_t*>(x), static_cast<const unsigned char*>(codes), static_cast<const float4*>(terms),
                        static_cast<const float*>(temperature), static_cast<const long long*>(seed), static_cast<const int32_t*>(seq_lens),
                        static_cast<float*>(bounds), static_cast<int32_t*>(floors), tokens, columns, words, (words + 15) / 16};
  const int shared = kWarps * kStages * kUnitBytes + (tokens > 8 ? 2 : 1) * columns / 64 * kUnitBytes;
  if (tokens > 8) return launch(screen<2>, dim3(blocks), kWarps * 32, shared, stream, a);
  return launch(screen<1>, dim3(blocks), kWarps * 32, shared, stream, a);
}

extern "C" int tandem_rescore(const void* x, const void* weights, const void* bounds, void* floors, const void* temperature,
                              const void* top_k, const void* top_p, const void* min_p, const void* seed, const void* seq_lens, void* tokens,
                              void* best, void* part_best, void* part_id, void* arrived, int rows, int columns, int words, int parts,
                              int stride, float slack, void* stream) {
  if (columns % 8 || words % 4) return -1;
  const RescoreArgs a = {static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weights), static_cast<const float*>(bounds),
                         static_cast<int32_t*>(floors), static_cast<const float*>(temperature), static_cast<const int32_t*>(top_k),
                         static_cast<const float*>(top_p), static_cast<const float*>(min_p), static_cast<const long long*>(seed),
                         static_cast<const int32_t*>(seq_lens), static_cast<int32_t*>(tokens), static_cast<float*>(best),
                         static_cast<float*>(part_best), static_cast<int32_t*>(part_id), static_cast<int32_t*>(arrived), columns, words,
                         stride, slack};
  return launch(rescore, dim3(parts, rows), kRescoreThreads, 16 * (words / 4 / parts + 1), stream, a);
}
