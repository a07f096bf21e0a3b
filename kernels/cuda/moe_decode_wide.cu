// MXFP4 expert products for many tokens, both in one persistent launch. Weights stream from memory once, become bf16 in registers and meet
// all tokens of an expert's group, which lie in shared memory, on the tensor cores of a warpgroup: a further token costs no decoding. Two
// warpgroups own half of the columns each; a block walks a contiguous range of (expert, 32 rows) of the first product, then of the second,
// four tiles at a time, one a warp. A token's result does not depend on the other tokens. Layout: `kernels/moe_decode.py`.
#include "experts.cuh"
#include "wgmma_bf16.cuh"

namespace {

#ifndef WIDE_QUADS
#define WIDE_QUADS 1
#endif
constexpr int kHalves = 2, kWarps = 4 * WIDE_QUADS, kThreads = kHalves * kWarps * 32;
constexpr int kPiece = 128;  // bytes of 8 tokens x 8 columns

// The tiles of a block's share of one product, up to four at a time, all of one group.
struct Walk {
  int at, last, run_end, group, tiles;

  __device__ __forceinline__ Walk(const MoeArgs& a, const Groups& s, int phase) {
    const Share share = share_of(a, s, phase);
    tiles = a.product[phase].tiles;
    at = share.first;
    last = share.last;
    group = at / tiles;
    run_end = min((group + 1) * tiles, last);
  }
  __device__ __forceinline__ bool has_tile(int warp) const { return at + warp < run_end; }
  __device__ __forceinline__ int tile(int warp) const { return at + warp - group * tiles; }
  __device__ __forceinline__ void next() {
    at = min(at + kWarps, run_end);
    if (at == run_end && at < last) group++, run_end = min(run_end + tiles, last);
  }
};

// One warp's ring of weights: its half of the columns of its tile, STEP units at a time, over all its tiles of both products.
template <int UNITS, int STEP, int STAGES>
struct WeightRing {
  static constexpr int kBytes = STEP * kUnitBytes, kParts = UNITS / STEP;
  unsigned char* ring;
  uint64_t* full;
  const MoeArgs& args;
  const Groups& groups;
  int half, warp;
  int phase;
  Walk walk;  // next to ask for
  int part = 0, slot_in = 0, slot_out = 0, parity = 0;

  __device__ __forceinline__ WeightRing(unsigned char* ring_, uint64_t* full_, const MoeArgs& a, const Groups& s)
      : ring(ring_), full(full_), args(a), groups(s), half(threadIdx.x / (kWarps * 32)), warp(threadIdx.x / 32 % kWarps), phase(a.first_phase),
        walk(a, s, a.first_phase) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) ask();
  }
  __device__ __forceinline__ void ask() {
    while (walk.at >= walk.last || !walk.has_tile(warp)) {
      if (walk.at < walk.last) {
        walk.next();
      } else {
        if (phase == args.last_phase) return;
        walk = Walk(args, groups, ++phase);
      }
    }
    const Product& p = args.product[phase];
    if (threadIdx.x % 32 == 0) {
      const size_t tile = static_cast<size_t>(groups.expert[walk.group]) * p.tiles + walk.tile(warp);
      copy_bulk(ring + slot_in * kBytes, p.weights + ((tile * kHalves + half) * kParts + part) * kBytes, kBytes, full + slot_in);
    }
    if (++slot_in == STAGES) slot_in = 0;
    if (++part < kParts) return;
    part = 0;
    walk.next();
  }
  __device__ __forceinline__ const unsigned char* wait(bool is_filled) {
    if (is_filled) barrier_wait(full + slot_out, parity);
    return ring + slot_out * kBytes;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (++slot_out == STAGES) slot_out = 0, parity ^= 1;
    ask();
  }
};

// A group's tokens into shared memory as the products read them. Lane 4 g + c of a weight unit has columns 8 c .. 8 c + 7, so the unit's
// four pieces of eight columns take one pair of every lane each.
template <int UNITS, int NT>
__device__ __forceinline__ void load_tokens(const Product& p, const Groups& s, int group, unsigned char* tokens) {
  constexpr int kUnits = kHalves * UNITS;
  const int count = s.count[group];
  const int16_t* order = s.order + s.begin[group];
#pragma unroll 2
  for (int i = threadIdx.x; i < (count + 7) / 8 * 8 * kUnits; i += kThreads) {
    const int n = i / (8 * kUnits) * 8 + i % 8, unit = i / 8 % kUnits;
    if (n >= count) continue;
    const uint16_t* from = p.x + static_cast<size_t>(order[n] / p.pairs_per_row) * (kUnits * 32) + unit * 32;
    uint4 v[4];
#pragma unroll
    for (int c = 0; c < 4; c++) v[c] = load_global_16(from + 8 * c);
    unsigned char* to = tokens + (unit * 4 * NT + n / 8) * kPiece + n % 8 * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    *reinterpret_cast<uint4*>(to + NT * kPiece) = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    *reinterpret_cast<uint4*>(to + 2 * NT * kPiece) = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    *reinterpret_cast<uint4*>(to + 3 * NT * kPiece) = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
  }
  wgmma_fence_shared();
}

// Eight weights of one row with their scale, exactly.
__device__ __forceinline__ void decode_row(uint32_t codes, uint32_t scales, int row, uint32_t (&w)[4]) {
  const uint32_t scale = (scales >> (8 * row) & 0xFFu) * 0x00800080u;
  spread_fp4(codes, w);
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = bf16x2_mul(w[i], scale);
}

// This warp's rows of one step of four tiles over its half of the columns. A warp without a tile takes part with what the ring holds.
template <int UNITS, int STEP, int NT, int STAGES>
__device__ __forceinline__ void multiply(float (&acc)[2][NT][4], WeightRing<UNITS, STEP, STAGES>& ring, uint64_t tokens, bool has_tile) {
  const int lane = threadIdx.x % 32;
  uint32_t a[STEP][2][2][4];
  for (int part = 0; part < UNITS / STEP; part++) {
    const unsigned char* slice = ring.wait(has_tile);
    uint4 codes[STEP];
    uint32_t scales[STEP];
#pragma unroll
    for (int u = 0; u < STEP; u++) {
      codes[u] = *reinterpret_cast<const uint4*>(slice + u * kUnitBytes + lane * 16);
      scales[u] = *reinterpret_cast<const uint32_t*>(slice + u * kUnitBytes + 512 + lane / 4 * 4);
    }
    if (has_tile) ring.release();
#pragma unroll
    for (int u = 0; u < STEP; u++) {
      wgmma_wait<STEP - 1>();  // the products that used these registers
#pragma unroll
      for (int mt = 0; mt < 2; mt++) {
        uint32_t top[4], bottom[4];  // rows g and g + 8 of this half of the tile
        decode_row(mt ? codes[u].z : codes[u].x, scales[u], 2 * mt, top);
        decode_row(mt ? codes[u].w : codes[u].y, scales[u], 2 * mt + 1, bottom);
#pragma unroll
        for (int k = 0; k < 2; k++) {
          a[u][mt][k][0] = top[2 * k], a[u][mt][k][1] = bottom[2 * k];
          a[u][mt][k][2] = top[2 * k + 1], a[u][mt][k][3] = bottom[2 * k + 1];
        }
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; k++)
#pragma unroll
        for (int mt = 0; mt < 2; mt++) wgmma_bf16(acc[mt], a[u][mt][k], tokens + (2 * k * NT * kPiece >> 4));
      wgmma_commit();
      tokens += 4 * NT * kPiece >> 4;
    }
  }
  wgmma_wait<0>();
}

template <bool GATE_UP, int UNITS, int STEP, int NT, int STAGES>
__device__ __forceinline__ void multiply_share(const MoeArgs& a, const Groups& s, WeightRing<UNITS, STEP, STAGES>& ring, unsigned char* tokens,
                                               float4* box) {
  const Product& p = a.product[GATE_UP ? 0 : 1];
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, warp = ring.warp, mt = ring.half;  // each half finishes 16 of the 32 rows
  const uint64_t mine = wgmma_tokens(tokens + mt * UNITS * 4 * NT * kPiece, NT * kPiece, kPiece);
  float4* sent = box + mt * NT * kWarps * 32 + threadIdx.x % (kWarps * 32);
  const float4* received = box + (1 - mt) * NT * kWarps * 32 + threadIdx.x % (kWarps * 32);
  int loaded = -1;
  for (Walk walk(a, s, GATE_UP ? 0 : 1); walk.at < walk.last; walk.next()) {
    if (walk.group != loaded) {
      __syncthreads();  // nobody reads the tokens before these any more
      load_tokens<UNITS, NT>(p, s, walk.group, tokens);
      __syncthreads();
      loaded = walk.group;
    }
    const bool has_tile = walk.has_tile(warp);
    const int tile = has_tile ? walk.tile(warp) : 0;
    const uint16_t* bias = p.bias + (static_cast<size_t>(s.expert[walk.group]) * p.tiles + tile) * 32 + mt * 16 + (GATE_UP ? 2 * g : g);
    const float bias_top = bf16_to_float(__ldg(bias)), bias_bottom = bf16_to_float(__ldg(bias + (GATE_UP ? 1 : 8)));
    float acc[2][NT][4] = {};
    if (GATE_UP && threadIdx.x == 0 && walk.at == share_of(a, s, 0).first) STAMP(3);
    multiply<UNITS, STEP, NT, STAGES>(acc, ring, mine, has_tile);
    if (GATE_UP && threadIdx.x == 0) STAMP(7);
    __syncthreads();  // the other half has taken the sums before these
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      const float(&v)[4] = acc[1][nt];
      const float(&w)[4] = acc[0][nt];
      sent[nt * kWarps * 32] = mt ? make_float4(w[0], w[1], w[2], w[3]) : make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    const int count = has_tile ? s.count[walk.group] : 0;
    const int16_t* order = s.order + s.begin[walk.group];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
      if (nt * 8 >= count) break;
      const float4 other = received[nt * kWarps * 32];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int n = nt * 8 + 2 * c + i;
        if (n >= count) continue;
        uint16_t* row = p.out + static_cast<size_t>(order[n]) * p.out_columns;
        finish<GATE_UP>(a, row, GATE_UP ? tile * 16 + mt * 8 + g : tile * 32 + mt * 16 + g,
                        (mt ? acc[1][nt][i] : acc[0][nt][i]) + (i ? other.y : other.x) + bias_top,
                        (mt ? acc[1][nt][2 + i] : acc[0][nt][2 + i]) + (i ? other.w : other.z) + bias_bottom);
      }
    }
  }
}

template <int UNITS, int STEP, int NT, int STAGES>
__global__ void __launch_bounds__(kThreads, 1) moe_experts_wide(const __grid_constant__ MoeArgs a) {
  DYNAMIC_SHARED(shared);
  using Ring = WeightRing<UNITS, STEP, STAGES>;
  constexpr int kBarriers = kHalves * kWarps * STAGES;
  unsigned char* tokens = shared;
  float4* box = reinterpret_cast<float4*>(tokens + kHalves * UNITS * 4 * NT * kPiece);
  unsigned char* rings = reinterpret_cast<unsigned char*>(box + kHalves * NT * kWarps * 32);
  uint64_t* full = reinterpret_cast<uint64_t*>(rings + kBarriers * Ring::kBytes);
  Groups& groups = *reinterpret_cast<Groups*>(full + kBarriers);
  const int warp = threadIdx.x / 32;

  if (warp == 0) STAMP(0);
  for (int i = threadIdx.x; i < kBarriers; i += kThreads) barrier_init(full + i, 1);
  barrier_init_fence();
  wait_for_previous_kernel();
  if (warp == 0) STAMP(1);
  build_groups<NT * 8>(groups, a);
  if (warp == 0) STAMP(2);
  start_next_kernel();

  Ring ring(rings + warp * STAGES * Ring::kBytes, full + warp * STAGES, a, groups);
  if (a.first_phase == 0) {
    multiply_share<true, UNITS, STEP, NT, STAGES>(a, groups, ring, tokens, box);
    if (warp == 0) STAMP(4);
    __syncthreads();
    if (threadIdx.x == 0) add_release(a.arrived, 1);
  }
  if (a.last_phase == 0) return;
  if (a.first_phase == 0) {
    if (warp == 0) wait_for_count(a.arrived, gridDim.x);
    __syncthreads();
  }
  if (warp == 0) STAMP(5);
  int gone = 0;
  if (threadIdx.x == 0) gone = atomicAdd(a.arrived + 1, 1);
  multiply_share<false, UNITS, STEP, NT, STAGES>(a, groups, ring, tokens, box);
  if (warp == 0) STAMP(6);
  if (threadIdx.x == 0 && gone == static_cast<int>(gridDim.x) - 1) a.arrived[0] = a.arrived[1] = 0;
}

template <int UNITS, int STEP, int NT, int STAGES>
int launch_wide(MoeArgs a, int blocks, void* stream) {
  constexpr int kShared = kHalves * UNITS * 4 * NT * kPiece + kHalves * NT * kWarps * 512 +
                          kHalves * kWarps * STAGES * (STEP * kUnitBytes + 8) + static_cast<int>(sizeof(Groups));
  static_assert(kShared <= 227 * 1024, "more shared memory than a block may have");
#ifdef TANDEM_EMULATE  // blocks run one after the other there: no block can wait for the others' first products
  a.last_phase = 0;
  launch(moe_experts_wide<UNITS, STEP, NT, STAGES>, dim3(blocks), kThreads, kShared, stream, a);
  a.first_phase = a.last_phase = 1;
#endif
  return launch(moe_experts_wide<UNITS, STEP, NT, STAGES>, dim3(blocks), kThreads, kShared, stream, a);
}

// Groups of 8, 16 or 24 tokens, so that most experts have one group.
template <int UNITS, int STEP, int STAGES1, int STAGES2, int STAGES3>
int launch_by_tokens(const MoeArgs& a, int all_experts, int blocks, void* stream) {
  if (a.pairs <= 5 * all_experts) return launch_wide<UNITS, STEP, 1, STAGES1>(a, blocks, stream);
  if (a.pairs <= 11 * all_experts) return launch_wide<UNITS, STEP, 2, STAGES2>(a, blocks, stream);
  return launch_wide<UNITS, STEP, 3, STAGES3>(a, blocks, stream);
}

}  // namespace

// Returns a CUDA error code, or -1 for a shape that has no instance. `blocks` must all be resident at once.
extern "C" int tandem_moe_experts(const void* x, const void* gate_up, const void* gate_up_bias, const void* down, const void* down_bias,
                                  const void* expert_ids, void* hidden, void* out, void* arrived, int tokens, int choices, int columns,
                                  int gate_up_tiles, int down_tiles, int first_expert, int experts, int all_experts, float alpha,
                                  float limit, int blocks, void* stream) {
  const Product first = {static_cast<const uint16_t*>(x), static_cast<const uint8_t*>(gate_up), static_cast<const uint16_t*>(gate_up_bias),
                         static_cast<uint16_t*>(hidden), gate_up_tiles, choices, gate_up_tiles * 16};
  const Product second = {static_cast<const uint16_t*>(hidden), static_cast<const uint8_t*>(down), static_cast<const uint16_t*>(down_bias),
                          static_cast<uint16_t*>(out), down_tiles, 1, down_tiles * 32};
  const MoeArgs a = {{first, second}, static_cast<const int32_t*>(expert_ids), static_cast<int32_t*>(arrived), tokens * choices,
                     first_expert, experts, 0, 1, alpha, limit};
  if (a.pairs > kMaxPairs || experts > kMaxExperts || gate_up_tiles * 16 != columns) return -1;
#if WIDE_QUADS == 2
  if (columns == 2880) return launch_by_tokens<45, 3, 6, 4, 2>(a, all_experts, blocks, stream);
#else
  if (columns == 2880) return launch_by_tokens<45, 5, 7, 5, 3>(a, all_experts, blocks, stream);
#endif
  if (columns == 256) return launch_by_tokens<4, 2, 4, 4, 4>(a, all_experts, blocks, stream);  // the tiny model
#ifdef TANDEM_EMULATE
  if (columns == 192) return launch_by_tokens<3, 3, 2, 2, 2>(a, all_experts, blocks, stream);
#endif
  return -1;
}
