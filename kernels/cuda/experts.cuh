// Parts of the expert products of a decode step: the arguments, the (expert, tokens) groups that every block makes for itself, a block's
// share of the tiles, the 4-bit decoder and what follows a sum. Layout of the weights: `kernels/moe_decode.py`.
#pragma once
#include "primitives.cuh"

namespace {

constexpr int kUnitBytes = 544;  // 32 rows x 32 columns: 512 bytes of codes, 32 of scales
constexpr int kMaxExperts = 128;
constexpr int kMaxPairs = 512;

struct Product {
  const uint16_t* x;       // [rows, columns] bf16
  const uint8_t* weights;  // [experts, tiles, columns / 32, 544], a tile is 32 rows
  const uint16_t* bias;    // [experts, tiles * 32] bf16, the checkpoint's order
  uint16_t* out;           // [pairs, out_columns] bf16
  int tiles, pairs_per_row, out_columns;
};
struct MoeArgs {
  Product product[2];         // gate/up with SwiGLU, down
  const int32_t* expert_ids;  // [pairs], global ids, -1 for none
  int32_t* arrived;           // [2], zero before and after
  int pairs, first_expert, experts, first_phase, last_phase;
  float alpha, limit;
};

// The (expert, tokens) groups of this step, the same experts in the same order in every block.
struct Groups {
  int16_t order[kMaxPairs];                 // pair ids, by expert
  int16_t begin[kMaxExperts + kMaxPairs];   // of a group, into order
  int16_t count[kMaxExperts + kMaxPairs];
  int16_t expert[kMaxExperts + kMaxPairs];
  int16_t local[kMaxPairs];                 // of a pair: its expert here, -1 for none
  int16_t rank[kMaxPairs];                  // of a pair among its expert's
  int32_t per_expert[kMaxExperts];
  int16_t first_pair[kMaxExperts], first_group[kMaxExperts];
  int total;
};

// Every block must put the same pairs into the same group. Inside a group their order is left to chance: a pair's column of the product
// does not see it. So the atomic's answer serves as rank where an expert has one group, and pairs are counted where it has more.
template <int MAX_TOKENS>
__device__ __forceinline__ void build_groups(Groups& s, const MoeArgs& a) {
  const int t = threadIdx.x;
  for (int e = t; e < kMaxExperts; e += blockDim.x) s.per_expert[e] = 0;
  __syncthreads();
  for (int i = t; i < a.pairs; i += blockDim.x) {
    const int e = __ldcg(a.expert_ids + i) - a.first_expert;
    const bool is_here = e >= 0 && e < a.experts;
    s.local[i] = is_here ? e : -1;
    if (is_here) s.rank[i] = atomicAdd(s.per_expert + e, 1);
  }
  __syncthreads();
  for (int i = t; i < a.pairs; i += blockDim.x) {
    const int e = s.local[i];
    if (e < 0 || s.per_expert[e] <= MAX_TOKENS) continue;
    int rank = 0;
    for (int j = 0; j < i; j++) rank += s.local[j] == e;
    s.rank[i] = rank;
  }
  if (t < 32) {
    constexpr int kEach = kMaxExperts / 32;
    int pairs = 0, groups = 0;
    for (int i = 0; i < kEach; i++) {
      const int n = s.per_expert[t * kEach + i];
      pairs += n;
      groups += (n + MAX_TOKENS - 1) / MAX_TOKENS;
    }
    int pairs_end = pairs, groups_end = groups;
    for (int step = 1; step < 32; step <<= 1) {
      const int p = __shfl_up_sync(0xFFFFFFFFu, pairs_end, step), g = __shfl_up_sync(0xFFFFFFFFu, groups_end, step);
      if (t >= step) pairs_end += p, groups_end += g;
    }
    int first_pair = pairs_end - pairs, first_group = groups_end - groups;
    for (int i = 0; i < kEach; i++) {
      const int e = t * kEach + i, n = s.per_expert[e];
      s.first_pair[e] = first_pair;
      for (int done = 0; done < n; done += MAX_TOKENS, first_group++) {
        s.begin[first_group] = first_pair + done;
        s.count[first_group] = min(n - done, MAX_TOKENS);
        s.expert[first_group] = e;
      }
      first_pair += n;
    }
    if (t == 31) s.total = groups_end;
  }
  __syncthreads();
  for (int i = t; i < a.pairs; i += blockDim.x) {
    const int e = s.local[i];
    if (e >= 0) s.order[s.first_pair[e] + s.rank[i]] = i;
  }
  __syncthreads();
}

// The same for up to 32 pairs, without a barrier of the block: every warp computes all of it and writes the same values.
template <int MAX_TOKENS>
__device__ __forceinline__ void build_few_groups(Groups& s, const MoeArgs& a) {
  const int lane = threadIdx.x % 32;
  const int e = lane < a.pairs ? __ldcg(a.expert_ids + lane) - a.first_expert : -1;
  const bool is_here = e >= 0 && e < a.experts;
  uint32_t equal = __ballot_sync(0xFFFFFFFFu, is_here), less = 0;  // pairs of this lane's expert, of experts before it
#pragma unroll
  for (int bit = 6; bit >= 0; bit--) {
    const uint32_t ones = __ballot_sync(0xFFFFFFFFu, e >> bit & 1);
    if (e >> bit & 1) {
      less |= equal & ~ones;
      equal &= ones;
    } else {
      equal &= ~ones;
    }
  }
  const uint32_t earlier = (1u << lane) - 1;
  const int rank = __popc(equal & earlier), place = __popc(less) + rank;
  const bool is_first = is_here && rank % MAX_TOKENS == 0;
  const uint32_t firsts = __reduce_or_sync(0xFFFFFFFFu, is_first ? 1u << place : 0u);
  if (is_here) s.order[place] = lane;
  if (is_first) {
    const int group = __popc(firsts & ((1u << place) - 1));
    s.begin[group] = place;
    s.count[group] = min(__popc(equal) - rank, MAX_TOKENS);
    s.expert[group] = e;
  }
  if (lane == 0) s.total = __popc(firsts);
  __syncwarp();
}

// A block's share of one product: items are (group, tile).
struct Share {
  int first, last;
};
__device__ __forceinline__ Share share_of(const MoeArgs& a, const Groups& s, int phase) {
  if (phase < a.first_phase || phase > a.last_phase) return {0, 0};
  const unsigned items = s.total * a.product[phase].tiles, blocks = gridDim.x;  // their product is far below 2^32
  return {static_cast<int>(items * blockIdx.x / blocks), static_cast<int>(items * (blockIdx.x + 1) / blocks)};
}

// Eight 4-bit weights of one row to four bf16 pairs, 2^126 times too small: 0.5 is a subnormal, which tensor cores take as it is. The
// stored bits lie so that a rotation puts sign, exponent and mantissa where bf16 has them.
__device__ __forceinline__ void spread_fp4(uint32_t q, uint32_t (&w)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  w[0] = q & kMask;
  w[1] = rotate_left(q, 13) & kMask;
  w[2] = rotate_left(q, 10) & kMask;
  w[3] = ((q & 0x001B001Bu) * 0x1084u) & kMask;
}
template <bool GATE_UP>
__device__ __forceinline__ void finish(const MoeArgs& a, uint16_t* row, int column, float top, float bottom) {
  if (GATE_UP) {
    top = top > a.limit ? a.limit : top;  // comparisons, not fminf: NaN must stay NaN
    bottom = bottom > a.limit ? a.limit : (bottom < -a.limit ? -a.limit : bottom);
    row[column] = bf16_from_float((bottom + 1.0f) * top / (1.0f + __expf(-a.alpha * top)));
  } else {
    row[column] = bf16_from_float(top);
    row[column + 8] = bf16_from_float(bottom);
  }
}

}  // namespace
