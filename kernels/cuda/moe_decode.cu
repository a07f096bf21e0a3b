// MXFP4 expert products for few tokens, both in one persistent launch. Weights are the 16-row operand and stream from memory once; tokens
// are the 8-column operand and stay in registers. Each warp owns a slice of the columns; a block walks a contiguous range of (expert, 32
// rows) of the first product, then of the second, and its last one or two warps add the others' sums in a fixed order, so that a token's
// result does not depend on the other tokens. The weights of the second product are asked for while the first one ends. Layout: `kernels/moe_decode.py`.
#include "experts.cuh"

namespace {

constexpr int kSums = 2;  // partial sums of two items in flight between the warps and those that add them
constexpr uint32_t kRaise = 0x71807180u;          // tokens times 2^100, so that products stay normal; a group's scale has the 2^126
constexpr float kLower = 7.888609052210118e-31f;  // 2^-100

// One warp's ring of weights, asked for STEP units at a time across the items of both products.
template <int WARPS, int UNITS, int STEP, int STAGES>
struct WeightStream {
  static constexpr int kBytes = STEP * kUnitBytes, kParts = UNITS / STEP;
  unsigned char* ring;  // this warp's
  uint64_t* full;
  const MoeArgs* args;
  const Groups* groups;
  int phase, group, tile, part, left;  // next to ask for; items left of this phase
  int slot_in, slot_out, parity;

  __device__ __forceinline__ void open(int next) {
    const Share share = share_of(*args, *groups, next);
    phase = next;
    left = share.last - share.first;
    group = share.first / args->product[next].tiles;
    tile = share.first % args->product[next].tiles;
    part = 0;
  }
  __device__ __forceinline__ void ask() {
    if (left == 0 && phase == 0) open(1);
    if (left == 0) return;
    const Product& p = args->product[phase];
    if (threadIdx.x % 32 == 0) {
      const size_t at = static_cast<size_t>(groups->expert[group]) * p.tiles + tile;
      copy_bulk(ring + slot_in * kBytes, p.weights + ((at * WARPS + threadIdx.x / 32) * kParts + part) * kBytes, kBytes, full + slot_in);
    }
    if (++slot_in == STAGES) slot_in = 0;
    if (++part < kParts) return;
    part = 0;
    left--;
    if (++tile == p.tiles) tile = 0, group++;
  }
  __device__ __forceinline__ const unsigned char* wait() {
    barrier_wait(full + slot_out, parity);
    return ring + slot_out * kBytes;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (++slot_out == STAGES) slot_out = 0, parity ^= 1;
    ask();
  }
};

// Partial sums on their way from the column warps to the adding warps.
struct Sums {
  uint64_t* done;   // [kSums], one arrival a column warp
  uint64_t* free;   // [kSums], one arrival an adding warp
  float4* values;   // [kSums][warps][2][NT_MAX][32]
};

template <int WARPS, int UNITS, int STEP, int NT_MAX, int NT, int STAGES>
__device__ __forceinline__ void multiply_group(const Product& p, const Groups& s, WeightStream<WARPS, UNITS, STEP, STAGES>& stream,
                                               const Sums& sums, int& item, int group, int tiles) {
  constexpr int kColumns = WARPS * UNITS * 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int count = s.count[group];
  const int16_t* order = s.order + s.begin[group];

  uint4 b[NT][UNITS];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int n = nt * 8 + g;
    const uint16_t* row = p.x + static_cast<size_t>(n < count ? order[n] / p.pairs_per_row : 0) * kColumns + warp * UNITS * 32 + 8 * c;
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      b[nt][j] = n < count ? load_global_16(row + j * 32) : make_uint4(0, 0, 0, 0);
      b[nt][j] = make_uint4(bf16x2_mul(b[nt][j].x, kRaise), bf16x2_mul(b[nt][j].y, kRaise), bf16x2_mul(b[nt][j].z, kRaise),
                              bf16x2_mul(b[nt][j].w, kRaise));
    }
  }
  for (int end = item + tiles; item < end; item++) {
    float acc[2][NT][4] = {};
#pragma unroll
    for (int part = 0; part < UNITS / STEP; part++) {
      const unsigned char* slice = stream.wait();
#pragma unroll
      for (int u = 0; u < STEP; u++) {
        const int j = part * STEP + u;
        const uint4 codes = *reinterpret_cast<const uint4*>(slice + u * kUnitBytes + lane * 16);
        const uint32_t scales = *reinterpret_cast<const uint32_t*>(slice + u * kUnitBytes + 512 + g * 4);
#pragma unroll
        for (int mt = 0; mt < 2; mt++) {
          uint32_t top[4], bottom[4];  // rows g and g + 8 of this half
          const uint32_t q_top = mt ? codes.z : codes.x, q_bottom = mt ? codes.w : codes.y;
          spread_fp4(q_top, top);
          spread_fp4(q_bottom, bottom);
          // The 32 columns of a unit share their scale: one multiplication a sum instead of one a weight.
          const float scale_top = __uint_as_float((scales >> (16 * mt) & 0xFFu) << 23);
          const float scale_bottom = __uint_as_float((scales >> (16 * mt + 8) & 0xFFu) << 23);
#pragma unroll
          for (int nt = 0; nt < NT; nt++) {
            float sum[4] = {};
            mma_bf16(sum, top[0], bottom[0], top[1], bottom[1], b[nt][j].x, b[nt][j].y);
            mma_bf16(sum, top[2], bottom[2], top[3], bottom[3], b[nt][j].z, b[nt][j].w);
            acc[mt][nt][0] += sum[0] * scale_top, acc[mt][nt][1] += sum[1] * scale_top;
            acc[mt][nt][2] += sum[2] * scale_bottom, acc[mt][nt][3] += sum[3] * scale_bottom;
          }
        }
      }
      stream.release();
    }
    const int slot = item % kSums;
    barrier_wait(sums.free + slot, (item / kSums & 1) ^ 1);
    float4* mine = sums.values + ((slot * WARPS + warp) * 2 * NT_MAX) * 32 + lane;
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
        mine[(mt * NT_MAX + nt) * 32] = make_float4(acc[mt][nt][0], acc[mt][nt][1], acc[mt][nt][2], acc[mt][nt][3]);
    __syncwarp();
    if (lane == 0) barrier_arrive(sums.done + slot);
  }
}

// Rows g and g + 8 of one half of a tile, for the epilogue: gate and up of column 8 t + g, or columns 16 t + g and + 8.
struct Biases {
  float top, bottom;
};
template <bool GATE_UP>
__device__ __forceinline__ Biases load_biases(const Product& p, int expert, int tile, int g, int mt) {
  const uint16_t* at = p.bias + (static_cast<size_t>(expert) * p.tiles + tile) * 32 + mt * 16 + (GATE_UP ? 2 * g : g);
  return {bf16_to_float(__ldg(at)), bf16_to_float(__ldg(at + (GATE_UP ? 1 : 8)))};
}

// An adding warp's walk over the block's share of one product: both halves of each tile, or its own where there are two such warps.
template <int WARPS, int NT_MAX, int ADDERS, bool GATE_UP>
__device__ __forceinline__ void add_sums(const MoeArgs& a, const Groups& s, const Sums& sums, int& item, Share share, int adder) {
  constexpr int kHalves = 2 / ADDERS;
  const Product& p = a.product[GATE_UP ? 0 : 1];
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  int group = share.first / p.tiles, tile = share.first % p.tiles;
  Biases bias[kHalves], next[kHalves] = {};
  auto load_next = [&] {
#pragma unroll
    for (int h = 0; h < kHalves; h++) next[h] = load_biases<GATE_UP>(p, s.expert[group], tile, g, adder + h);
  };
  if (share.first < share.last) load_next();
  for (int at = share.first; at < share.last; at++, item++) {
#pragma unroll
    for (int h = 0; h < kHalves; h++) bias[h] = next[h];
    const int count = s.count[group], this_tile = tile, slot = item % kSums;
    const int16_t* order = s.order + s.begin[group];
    if (++tile == p.tiles) tile = 0, group++;
    if (at + 1 < share.last) load_next();
    barrier_wait(sums.done + slot, item / kSums & 1);
    const float4* from = sums.values + slot * WARPS * 2 * NT_MAX * 32 + lane;
#pragma unroll
    for (int nt = 0; nt < NT_MAX; nt++) {
      if (nt * 8 >= count) break;
      float4 sum[kHalves] = {};
#pragma unroll
      for (int w = 0; w < WARPS; w++)
#pragma unroll
        for (int h = 0; h < kHalves; h++) {
          const float4 v = from[((w * 2 + adder + h) * NT_MAX + nt) * 32];
          sum[h].x += v.x, sum[h].y += v.y, sum[h].z += v.z, sum[h].w += v.w;
        }
#pragma unroll
      for (int second = 0; second < 2; second++) {
        const int n = nt * 8 + 2 * c + second;
        if (n >= count) continue;
        uint16_t* row = p.out + static_cast<size_t>(order[n]) * p.out_columns;
#pragma unroll
        for (int h = 0; h < kHalves; h++)
          finish<GATE_UP>(a, row, GATE_UP ? this_tile * 16 + (adder + h) * 8 + g : this_tile * 32 + (adder + h) * 16 + g,
                          (second ? sum[h].y : sum[h].x) * kLower + bias[h].top,
                          (second ? sum[h].w : sum[h].z) * kLower + bias[h].bottom);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sums.free + slot);
  }
}

// For few tokens the compiler is told of more warps than there are: its registers then leave room for the next kernel's first blocks.
template <int WARPS, int UNITS, int STEP, int NT_MAX, int STAGES, int ADDERS>
__global__ void __launch_bounds__((WARPS + ADDERS + (NT_MAX == 1 ? 4 : 0)) * 32, 1) moe_experts(const __grid_constant__ MoeArgs a) {
  DYNAMIC_SHARED(shared);
  using Stream = WeightStream<WARPS, UNITS, STEP, STAGES>;
  constexpr int kBarriers = WARPS * STAGES + 2 * kSums + 1;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  unsigned char* rings = shared + (kBarriers * 8 + 127) / 128 * 128;
  const Sums sums = {full + WARPS * STAGES, full + WARPS * STAGES + kSums, reinterpret_cast<float4*>(rings + WARPS * STAGES * Stream::kBytes)};
  Groups& groups = *reinterpret_cast<Groups*>(sums.values + kSums * WARPS * 2 * NT_MAX * 32);
  uint64_t* ready = sums.free + kSums;  // all blocks have finished the first product
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  for (int i = threadIdx.x; i < kBarriers; i += blockDim.x)
    barrier_init(full + i, i < WARPS * STAGES ? 1 : i < WARPS * STAGES + kSums ? WARPS : ADDERS);
  barrier_init_fence();
  __syncthreads();
  wait_for_previous_kernel();
  if constexpr (NT_MAX == 1) {
    build_few_groups<NT_MAX * 8>(groups, a);
  } else {
    build_groups<NT_MAX * 8>(groups, a);
  }
  start_next_kernel();

  int item = 0, gone = 0;
  if (warp >= WARPS) {
    if (a.first_phase == 0) {
      add_sums<WARPS, NT_MAX, ADDERS, true>(a, groups, sums, item, share_of(a, groups, 0), warp - WARPS);
      __syncwarp();
      if (lane == 0) add_release(a.arrived, 1);
      if (a.last_phase == 1) wait_for_count(a.arrived, ADDERS * gridDim.x);  // not by all warps: many would hold up the atomics
      if (lane == 0) barrier_arrive(ready);
    }
    if (a.last_phase == 1 && lane == 0) gone = atomicAdd(a.arrived + 1, 1);
    if (a.last_phase == 1) add_sums<WARPS, NT_MAX, ADDERS, false>(a, groups, sums, item, share_of(a, groups, 1), warp - WARPS);
    if (lane == 0 && a.last_phase == 1 && gone == static_cast<int>(ADDERS * gridDim.x) - 1) a.arrived[0] = a.arrived[1] = 0;
  } else {
    Stream stream = {rings + warp * STAGES * Stream::kBytes, full + warp * STAGES, &a, &groups, 0, 0, 0, 0, 0, 0, 0, 0};
    stream.open(0);
#pragma unroll
    for (int i = 0; i < STAGES; i++) stream.ask();
    for (int phase = a.first_phase; phase <= a.last_phase; phase++) {
      const Product& p = a.product[phase];
      const Share share = share_of(a, groups, phase);
      if (phase > a.first_phase) barrier_wait(ready, 0);
      for (int at = share.first; at < share.last;) {
        const int group = at / p.tiles, tiles = min(p.tiles - at % p.tiles, share.last - at), count = groups.count[group];
        if (NT_MAX == 1 || count <= 8)
          multiply_group<WARPS, UNITS, STEP, NT_MAX, 1, STAGES>(p, groups, stream, sums, item, group, tiles);
        else if (NT_MAX == 2 || count <= 16)
          multiply_group<WARPS, UNITS, STEP, NT_MAX, NT_MAX < 2 ? 1 : 2, STAGES>(p, groups, stream, sums, item, group, tiles);
        else
          multiply_group<WARPS, UNITS, STEP, NT_MAX, NT_MAX < 3 ? 1 : 3, STAGES>(p, groups, stream, sums, item, group, tiles);
        at += tiles;
      }
    }
  }
}

template <int WARPS, int UNITS, int STEP, int NT_MAX, int STAGES, int ADDERS>
int launch_moe(MoeArgs a, int blocks, void* stream) {
  constexpr int kShared = ((WARPS * STAGES + 2 * kSums + 1) * 8 + 127) / 128 * 128 + WARPS * STAGES * STEP * kUnitBytes +
                          kSums * WARPS * 2 * NT_MAX * 512 + static_cast<int>(sizeof(Groups));
  static_assert(kShared <= 227 * 1024, "more shared memory than a block may have");
#ifdef TANDEM_EMULATE  // blocks run one after the other there: no block can wait for the others' first products
  a.last_phase = 0;
  launch(moe_experts<WARPS, UNITS, STEP, NT_MAX, STAGES, ADDERS>, dim3(blocks), (WARPS + ADDERS) * 32, kShared, stream, a);
  a.first_phase = a.last_phase = 1;
#endif
  return launch(moe_experts<WARPS, UNITS, STEP, NT_MAX, STAGES, ADDERS>, dim3(blocks), (WARPS + ADDERS) * 32, kShared, stream, a);
}

// Which form suits which step is `choose_form`'s in `kernels/moe_decode.py`.
template <int WARPS, int UNITS>
int launch_form(const MoeArgs& a, int group_tokens, int adders, int blocks, void* stream) {
  if (group_tokens == 8 && adders == 1 && a.pairs <= 32) return launch_moe<WARPS, UNITS, UNITS, 1, 3, 1>(a, blocks, stream);
  if (group_tokens == 16 && adders == 1) return launch_moe<WARPS, UNITS, UNITS, 2, 3, 1>(a, blocks, stream);
  if (group_tokens == 16 && adders == 2) return launch_moe<WARPS, UNITS, UNITS, 2, 3, 2>(a, blocks, stream);
  if (group_tokens == 24 && adders == 1) return launch_moe<WARPS, UNITS, UNITS / 2, 3, 3, 1>(a, blocks, stream);
  return -1;
}

}  // namespace

// Returns a CUDA error code, or -1 for a shape that has no instance. `blocks` must all be resident at once.
extern "C" int tandem_moe_experts(const void* x, const void* gate_up, const void* gate_up_bias, const void* down, const void* down_bias,
                                  const void* expert_ids, void* hidden, void* out, void* arrived, int tokens, int choices, int columns,
                                  int gate_up_tiles, int down_tiles, int first_expert, int experts, float alpha, float limit,
                                  int group_tokens, int adders, int blocks, void* stream) {
  const Product first = {static_cast<const uint16_t*>(x), static_cast<const uint8_t*>(gate_up), static_cast<const uint16_t*>(gate_up_bias),
                         static_cast<uint16_t*>(hidden), gate_up_tiles, choices, gate_up_tiles * 16};
  const Product second = {static_cast<const uint16_t*>(hidden), static_cast<const uint8_t*>(down), static_cast<const uint16_t*>(down_bias),
                          static_cast<uint16_t*>(out), down_tiles, 1, down_tiles * 32};
  const MoeArgs a = {{first, second}, static_cast<const int32_t*>(expert_ids), static_cast<int32_t*>(arrived), tokens * choices,
                     first_expert, experts, 0, 1, alpha, limit};
  if (a.pairs > kMaxPairs || experts > kMaxExperts || gate_up_tiles * 16 != columns) return -1;
  if (columns == 2880) return launch_form<15, 6>(a, group_tokens, adders, blocks, stream);
  if (columns == 256) return launch_form<4, 2>(a, group_tokens, adders, blocks, stream);  // the tiny model
#ifdef TANDEM_EMULATE
  if (columns == 192) return launch_form<3, 2>(a, group_tokens, adders, blocks, stream);
#endif
  return -1;
}
