// MXFP4 expert products for few tokens, both in one persistent launch. Weights are the 16-row operand and stream from memory once; tokens
// are the 8-column operand and stay in registers. A block walks a contiguous range of items (expert, 32 rows) of the first product, then of
// the second: one thread asks for the items' weights as far ahead as there is room, across both products; each column warp multiplies its
// slice of the columns; four warps add the others' sums in a fixed order, so that a token's result does not depend on the other tokens.
// Layout: `kernels/moe_decode.py`.
#include "experts.cuh"

namespace {

constexpr int kStages = 3;  // items whose weights are here or on their way
constexpr int kSums = 2;    // items whose partial sums are between the column warps and those that add them
constexpr int kAdders = 4;
constexpr int kColumnRegisters = 104, kAdderRegisters = 64;
constexpr uint32_t kRaise = 0x71807180u;          // tokens times 2^100, so that products stay normal; a group's scale has the 2^126
constexpr float kLower = 7.888609052210118e-31f;  // 2^-100

// The adding warps are a warpgroup of their own, since registers are moved between those; the last warp before them asks for the weights.
template <int WARPS>
constexpr int kFirstAdder = WARPS / 4 * 4 + 4;

// Weights on their way from memory to the column warps.
struct Ring {
  uint64_t* full;   // [kStages][COPIES]
  uint64_t* empty;  // [kStages], one arrival a column warp
  unsigned char* items;
};
// Partial sums on their way from the column warps to the adding warps.
struct Sums {
  uint64_t* done;  // [kSums], one arrival a column warp
  uint64_t* free;  // [kSums], one arrival an adding warp
  float2* values;  // [kSums][warps][2 halves][NT_MAX][2 tokens][32 lanes], rows g and g + 8 of a half
};

// One thread's part: the weights of this block's items, in the order in which they are multiplied.
template <int WARPS, int UNITS, int COPIES>
__device__ __forceinline__ void ask_for_weights(const MoeArgs& a, const Groups& s, const Ring& ring) {
  constexpr int kBytes = WARPS * UNITS * kUnitBytes / COPIES;
  int slot = 0, parity = 1;
  for (int phase = a.first_phase; phase <= a.last_phase; phase++) {
    const Product& p = a.product[phase];
    const Share share = share_of(a, s, phase);
    int group = share.first / p.tiles, tile = share.first % p.tiles;
    for (int at = share.first; at < share.last; at++) {
      const unsigned char* from = p.weights + (static_cast<size_t>(s.expert[group]) * p.tiles + tile) * (kBytes * COPIES);
      barrier_wait(ring.empty + slot, parity);
#pragma unroll
      for (int i = 0; i < COPIES; i++)
        copy_bulk(ring.items + (slot * COPIES + i) * kBytes, from + i * kBytes, kBytes, ring.full + slot * COPIES + i);
      if (++slot == kStages) slot = 0, parity ^= 1;
      if (++tile == p.tiles) tile = 0, group++;
    }
  }
}

// Where a column warp stands.
struct Place {
  int item, slot, parity;  // slot, parity: of the ring
};

template <int WARPS, int UNITS, int NT_MAX, int NT, int COPIES>
__device__ __forceinline__ void multiply_group(const Product& p, const Groups& s, const Ring& ring, const Sums& sums, Place& at, int group,
                                               int tiles) {
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
  for (int end = at.item + tiles; at.item < end; at.item++) {
    float acc[2][NT][4] = {};
    const unsigned char* slice = ring.items + (at.slot * WARPS + warp) * (UNITS * kUnitBytes);
    barrier_wait(ring.full + at.slot * COPIES + warp / (WARPS / COPIES), at.parity);
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      const uint4 codes = *reinterpret_cast<const uint4*>(slice + j * kUnitBytes + lane * 16);
      const uint32_t scales = *reinterpret_cast<const uint32_t*>(slice + j * kUnitBytes + 512 + g * 4);
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
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + at.slot);
    if (++at.slot == kStages) at.slot = 0, at.parity ^= 1;
    const int slot = at.item % kSums;
    barrier_wait(sums.free + slot, (at.item / kSums & 1) ^ 1);
    float2* mine = sums.values + (slot * WARPS + warp) * (2 * NT_MAX * 64) + lane;
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        mine[(mt * NT_MAX + nt) * 64] = make_float2(acc[mt][nt][0], acc[mt][nt][2]);
        mine[(mt * NT_MAX + nt) * 64 + 32] = make_float2(acc[mt][nt][1], acc[mt][nt][3]);
      }
    __syncwarp();
    if (lane == 0) barrier_arrive(sums.done + slot);
  }
}

// A column warp's walk over the block's share of both products.
template <int WARPS, int UNITS, int NT_MAX, int COPIES>
__device__ __forceinline__ void multiply(const MoeArgs& a, const Groups& s, const Ring& ring, const Sums& sums, uint64_t* ready) {
  Place place = {};
  for (int phase = a.first_phase; phase <= a.last_phase; phase++) {
    const Product& p = a.product[phase];
    const Share share = share_of(a, s, phase);
    if (phase > a.first_phase) barrier_wait(ready, 0);
    for (int at = share.first; at < share.last;) {
      const int group = at / p.tiles, tiles = min(p.tiles - at % p.tiles, share.last - at);
      if (NT_MAX == 1 || s.count[group] <= kSmallGroup)
        multiply_group<WARPS, UNITS, NT_MAX, 1, COPIES>(p, s, ring, sums, place, group, tiles);
      else
        multiply_group<WARPS, UNITS, NT_MAX, NT_MAX, COPIES>(p, s, ring, sums, place, group, tiles);
      at += tiles;
    }
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

// An adding warp's walk over the block's share of one product: one half of each tile, every other token.
template <int WARPS, int NT_MAX, bool GATE_UP>
__device__ __forceinline__ void add_sums(const MoeArgs& a, const Groups& s, const Sums& sums, int& item) {
  const Product& p = a.product[GATE_UP ? 0 : 1];
  const Share share = share_of(a, s, GATE_UP ? 0 : 1);
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, half = threadIdx.x / 32 % 2, token = threadIdx.x / 64 % 2;
  int group = share.first / p.tiles, tile = share.first % p.tiles;
  Biases next = {};
  if (share.first < share.last) next = load_biases<GATE_UP>(p, s.expert[group], tile, g, half);
  for (int at = share.first; at < share.last; at++, item++) {
    const Biases bias = next;
    const int count = s.count[group], column = GATE_UP ? tile * 16 + half * 8 + g : tile * 32 + half * 16 + g, slot = item % kSums;
    const int16_t* order = s.order + s.begin[group];
    if (++tile == p.tiles) tile = 0, group++;
    if (at + 1 < share.last) next = load_biases<GATE_UP>(p, s.expert[group], tile, g, half);
    barrier_wait(sums.done + slot, item / kSums & 1);
    const float2* from = sums.values + slot * WARPS * (2 * NT_MAX * 64) + half * (NT_MAX * 64) + token * 32 + lane;
#pragma unroll
    for (int nt = 0; nt < NT_MAX; nt++) {
      if (nt * 8 >= count) break;
      float top = 0, bottom = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float2 v = from[w * (2 * NT_MAX * 64) + nt * 64];
        top += v.x, bottom += v.y;
      }
      const int n = nt * 8 + 2 * c + token;
      if (n < count)
        finish<GATE_UP>(a, p.out + static_cast<size_t>(order[n]) * p.out_columns, column, top * kLower + bias.top, bottom * kLower + bias.bottom);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sums.free + slot);
  }
}

// An adding warp's walk over both products. The block's first one tells the other blocks when all of its first product is written, and
// its own column warps when all blocks' is: more warps that wait would hold up the counter.
template <int WARPS, int NT_MAX>
__device__ __forceinline__ void add(const MoeArgs& a, const Groups& s, const Sums& sums, uint64_t* added, uint64_t* ready) {
  const int lane = threadIdx.x % 32;
  const bool is_first = threadIdx.x / 32 == kFirstAdder<WARPS>;
  int item = 0, gone = 0;
  if (a.first_phase == 0) {
    add_sums<WARPS, NT_MAX, true>(a, s, sums, item);
    __syncwarp();
    if (lane == 0) barrier_arrive(added);
    if (is_first) {
      barrier_wait(added, 0);
      if (lane == 0) add_release(a.arrived, 1);
      if (a.last_phase == 1) wait_for_count(a.arrived, gridDim.x);
      if (lane == 0) barrier_arrive(ready);
    }
  }
  if (a.last_phase == 0) return;
  if (is_first && lane == 0) gone = atomicAdd(a.arrived + 1, 1);
  add_sums<WARPS, NT_MAX, false>(a, s, sums, item);
  if (is_first && lane == 0 && gone == static_cast<int>(gridDim.x) - 1) a.arrived[0] = a.arrived[1] = 0;
}

template <int COPIES>
constexpr int kBarriers = kStages * COPIES + kStages + 2 * kSums + 2;

// For few tokens the compiler is told of more warps than there are: at 72 registers a thread a block of `combine_norm` finds room beside it.
template <int WARPS, int UNITS, int NT_MAX, int COPIES>
__global__ void __launch_bounds__((kFirstAdder<WARPS> + kAdders + (NT_MAX == 1 ? 8 : 0)) * 32, 1) moe_experts(const __grid_constant__ MoeArgs a) {
  DYNAMIC_SHARED(shared);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared);
  unsigned char* items = shared + (kBarriers<COPIES> * 8 + 127) / 128 * 128;
  const Ring ring = {barriers, barriers + kStages * COPIES, items};
  const Sums sums = {ring.empty + kStages, ring.empty + kStages + kSums, reinterpret_cast<float2*>(items + kStages * WARPS * UNITS * kUnitBytes)};
  uint64_t* added = sums.free + kSums;  // by the adding warps: this block's first product is written
  uint64_t* ready = added + 1;          // all blocks' is
  Groups& groups = *reinterpret_cast<Groups*>(sums.values + kSums * WARPS * 2 * NT_MAX * 64);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x < kBarriers<COPIES>) {
    uint64_t* barrier = barriers + threadIdx.x;
    barrier_init(barrier, barrier < ring.empty || barrier == ready ? 1 : barrier < sums.free ? WARPS : kAdders);
  }
  barrier_init_fence();
  if constexpr (NT_MAX > 1) clear_groups(groups, a);
  __syncthreads();
  wait_for_previous_kernel();
  if constexpr (NT_MAX == 1) {
    build_few_groups<NT_MAX * 8>(groups, a);
  } else {
    build_groups<NT_MAX * 8>(groups, a);
  }
  start_next_kernel();

  if (warp >= kFirstAdder<WARPS>) {
    if constexpr (NT_MAX > 1) leave_registers<kAdderRegisters>();
    add<WARPS, NT_MAX>(a, groups, sums, added, ready);
  } else {
    if constexpr (NT_MAX > 1) take_registers<kColumnRegisters>();
    if (warp < WARPS) multiply<WARPS, UNITS, NT_MAX, COPIES>(a, groups, ring, sums, ready);
    if (threadIdx.x == (kFirstAdder<WARPS> - 1) * 32) ask_for_weights<WARPS, UNITS, COPIES>(a, groups, ring);
  }
}

template <int WARPS, int UNITS, int NT_MAX, int COPIES>
int launch_moe(MoeArgs a, int blocks, void* stream) {
  constexpr int kShared = (kBarriers<COPIES> * 8 + 127) / 128 * 128 + kStages * WARPS * UNITS * kUnitBytes + kSums * WARPS * 2 * NT_MAX * 512 +
                          static_cast<int>(sizeof(Groups));
  static_assert(kShared <= 227 * 1024, "more shared memory than a block may have");
  constexpr int kThreads = (kFirstAdder<WARPS> + kAdders) * 32;
#ifdef TANDEM_EMULATE  // blocks run one after the other there: no block can wait for the others' first products
  a.last_phase = 0;
  launch(moe_experts<WARPS, UNITS, NT_MAX, COPIES>, dim3(blocks), kThreads, kShared, stream, a);
  a.first_phase = a.last_phase = 1;
#endif
  return launch(moe_experts<WARPS, UNITS, NT_MAX, COPIES>, dim3(blocks), kThreads, kShared, stream, a);
}

// Which instance suits which step is `choose_group_tokens`'s in `kernels/moe_decode.py`; how many copies bring an item's weights was measured there.
template <int WARPS, int UNITS>
int launch_form(const MoeArgs& a, int group_tokens, int blocks, void* stream) {
  if (group_tokens == 8 && a.pairs <= 32) return launch_moe<WARPS, UNITS, 1, 1>(a, blocks, stream);
  if (group_tokens == 16) return launch_moe<WARPS, UNITS, 2, WARPS>(a, blocks, stream);
  return -1;
}

}  // namespace

// Returns a CUDA error code, or -1 for a shape that has no instance. `blocks` must all be resident at once.
extern "C" int tandem_moe_experts(const void* x, const void* gate_up, const void* gate_up_bias, const void* down, const void* down_bias,
                                  const void* expert_ids, void* hidden, void* out, void* arrived, int tokens, int choices, int columns,
                                  int gate_up_tiles, int down_tiles, int first_expert, int experts, float alpha, float limit,
                                  int group_tokens, int blocks, void* stream) {
  const Product first = {static_cast<const uint16_t*>(x), static_cast<const uint8_t*>(gate_up), static_cast<const uint16_t*>(gate_up_bias),
                         static_cast<uint16_t*>(hidden), gate_up_tiles, choices, gate_up_tiles * 16};
  const Product second = {static_cast<const uint16_t*>(hidden), static_cast<const uint8_t*>(down), static_cast<const uint16_t*>(down_bias),
                          static_cast<uint16_t*>(out), down_tiles, 1, down_tiles * 32};
  const MoeArgs a = {{first, second}, static_cast<const int32_t*>(expert_ids), static_cast<int32_t*>(arrived), tokens * choices,
                     first_expert, experts, 0, 1, alpha, limit};
  if (a.pairs > kMaxPairs || experts > kMaxExperts || gate_up_tiles * 16 != columns) return -1;
  if (columns == 2880) return launch_form<15, 6>(a, group_tokens, blocks, stream);
  if (columns == 256) return launch_form<4, 2>(a, group_tokens, blocks, stream);  // the tiny model
#ifdef TANDEM_EMULATE
  if (columns == 192) return launch_form<3, 2>(a, group_tokens, blocks, stream);
#endif
  return -1;
}
