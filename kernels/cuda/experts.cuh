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

constexpr int kSmallGroup = 8;                  // tokens
constexpr int kLargeCost = 5, kSmallCost = 4;  // of an item of a larger group, and of such a one: what the tensor cores and what the memory takes

// The (expert, tokens) groups of this step, the same experts and pairs in the same order in every block; larger groups come first.
constexpr int kChunks = kMaxPairs / 32;
struct Groups {
  int16_t order[kMaxPairs];                 // pair ids, by expert
  int16_t begin[kMaxExperts + kMaxPairs];   // of a group, into order
  int16_t count[kMaxExperts + kMaxPairs];
  int16_t expert[kMaxExperts + kMaxPairs];
  int16_t place[kMaxPairs];                 // of a pair: 32 times its expert here and its rank among that one's in its chunk, -1 for none
  uint32_t seen[kChunks][kMaxExperts / 4];  // pairs of four experts in a chunk of 32, a byte each
  int large, total;
};

// Which lanes have this lane's expert, and which an expert before it. Lanes without one take no part.
struct Peers {
  uint32_t equal, less;
};
__device__ __forceinline__ Peers compare_experts(int e, bool is_here) {
  Peers peers = {__ballot_sync(0xFFFFFFFFu, is_here), 0};
#pragma unroll
  for (int bit = 6; bit >= 0; bit--) {
    const uint32_t ones = __ballot_sync(0xFFFFFFFFu, e >> bit & 1);
    if (e >> bit & 1) {
      peers.less |= peers.equal & ~ones;
      peers.equal &= ones;
    } else {
      peers.equal &= ~ones;
    }
  }
  return peers;
}

// Pairs of experts 4 l, 4 l + 2 and of 4 l + 1, 4 l + 3 of lane l, 16 bits each.
struct Counts {
  uint32_t even, odd;
};
__device__ __forceinline__ Counts count_pairs(const Groups& s, int chunks) {
  Counts n = {};
  for (int chunk = 0; chunk < chunks; chunk++) {
    const uint32_t bytes = s.seen[chunk][threadIdx.x % 32];
    n.even += bytes & 0x00FF00FFu, n.odd += bytes >> 8 & 0x00FF00FFu;
  }
  return n;
}
__device__ __forceinline__ int count_of(const Counts& n, int e) { return (e & 1 ? n.odd : n.even) >> (e & 2) * 8 & 0xFFFFu; }

// Before `build_groups`, a barrier of the block between them.
__device__ __forceinline__ void clear_groups(Groups& s, const MoeArgs& a) {
  for (int i = threadIdx.x; i < (a.pairs + 31) / 32 * (kMaxExperts / 4); i += blockDim.x) s.seen[0][i] = 0;
}

// Every warp counts the pairs of its chunks by expert, then puts them into their order.
template <int MAX_TOKENS>
__device__ __forceinline__ void build_groups(Groups& s, const MoeArgs& a) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, chunks = (a.pairs + 31) / 32;
  for (int chunk = warp; chunk < chunks; chunk += warps) {
    const int i = chunk * 32 + lane, e = i < a.pairs ? __ldcg(a.expert_ids + i) - a.first_expert : -1;
    const bool is_here = e >= 0 && e < a.experts;
    const uint32_t equal = compare_experts(e, is_here).equal;
    const int rank = __popc(equal & ((1u << lane) - 1));
    if (is_here && rank == 0) reinterpret_cast<uint8_t*>(s.seen[chunk])[e] = static_cast<uint8_t>(__popc(equal));
    s.place[i] = is_here ? e * 32 + rank : -1;
  }
  __syncthreads();
  if (warp < chunks || warp == warps - 1) {
    const Counts all = count_pairs(s, chunks);
    int ends = 0;  // of this and earlier lanes' experts: pairs (12 bits), larger groups, small groups (10 bits each)
    for (int j = 0; j < 4; j++) {
      const int n = count_of(all, j), rest = n % MAX_TOKENS;
      ends += n << 20 | (n / MAX_TOKENS + (rest > kSmallGroup)) << 10 | (rest > 0 && rest <= kSmallGroup);
    }
    const int own = ends;
    for (int step = 1; step < 32; step <<= 1) {
      const int before = __shfl_up_sync(0xFFFFFFFFu, ends, step);
      if (lane >= step) ends += before;
    }
    const uint32_t first = (ends - own) >> 20, second = first + count_of(all, 0), third = second + count_of(all, 1);
    const Counts firsts = {first | third << 16, second | (third + count_of(all, 2)) << 16};
    for (int chunk = warp; chunk < chunks; chunk += warps) {
      const Counts before = count_pairs(s, chunk);
      const int place = s.place[chunk * 32 + lane], e = max(place, 0) / 32;
      const Counts at = {__shfl_sync(0xFFFFFFFFu, firsts.even + before.even, e / 4), __shfl_sync(0xFFFFFFFFu, firsts.odd + before.odd, e / 4)};
      if (place >= 0) s.order[count_of(at, e) + place % 32] = static_cast<int16_t>(chunk * 32 + lane);
    }
    const int sums = __shfl_sync(0xFFFFFFFFu, ends, 31), larges = sums >> 10 & 1023;
    if (warp == warps - 1) {
      int large = (ends - own) >> 10 & 1023, small = larges + ((ends - own) & 1023);
      for (int j = 0; j < 4; j++)
        for (int n = count_of(all, j), done = 0; done < n; done += MAX_TOKENS) {
          const int group = n - done > kSmallGroup ? large++ : small++;
          s.begin[group] = static_cast<int16_t>(count_of(firsts, j) + done);
          s.count[group] = static_cast<int16_t>(min(n - done, MAX_TOKENS));
          s.expert[group] = static_cast<int16_t>(lane * 4 + j);
        }
      if (lane == 0) s.large = larges, s.total = larges + (sums & 1023);
    }
  }
  __syncthreads();
}

// The same for up to 32 pairs, without a barrier of the block: every warp computes all of it and writes the same values.
template <int MAX_TOKENS>
__device__ __forceinline__ void build_few_groups(Groups& s, const MoeArgs& a) {
  const int lane = threadIdx.x % 32;
  const int e = lane < a.pairs ? __ldcg(a.expert_ids + lane) - a.first_expert : -1;
  const bool is_here = e >= 0 && e < a.experts;
  const Peers peers = compare_experts(e, is_here);
  const int rank = __popc(peers.equal & ((1u << lane) - 1)), place = __popc(peers.less) + rank;
  const bool is_first = is_here && rank % MAX_TOKENS == 0;
  const uint32_t firsts = __reduce_or_sync(0xFFFFFFFFu, is_first ? 1u << place : 0u);
  if (is_here) s.order[place] = lane;
  if (is_first) {
    const int group = __popc(firsts & ((1u << place) - 1));
    s.begin[group] = place;
    s.count[group] = min(__popc(peers.equal) - rank, MAX_TOKENS);
    s.expert[group] = e;
  }
  if (lane == 0) s.large = 0, s.total = __popc(firsts);
  __syncwarp();
}

// A block's share of one product: items are (group, tile), cut where their costs are equal.
struct Share {
  int first, last;
};
__device__ __forceinline__ Share share_of(const MoeArgs& a, const Groups& s, int phase) {
  if (phase < a.first_phase || phase > a.last_phase) return {0, 0};
  const unsigned tiles = a.product[phase].tiles, larges = s.large * tiles;
  const unsigned cost = larges * kLargeCost + (s.total - s.large) * tiles * kSmallCost;  // times the blocks far below 2^32
  auto item_at = [&](unsigned block) {
    const unsigned at = cost * block / gridDim.x, of_larges = larges * kLargeCost;
    return static_cast<int>(at < of_larges ? at / kLargeCost : larges + (at - of_larges) / kSmallCost);
  };
  return {item_at(blockIdx.x), item_at(blockIdx.x + 1)};
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
