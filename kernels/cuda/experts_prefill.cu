// The FP8 expert products of prefill, one persistent launch each: gate/up with SwiGLU and quantisation behind it, and down. Weight rows are
// the 64-row operand of the tensor cores and tokens the columns, so that an expert's tokens are padded to 8 and not to a tile of 128.
//
// A tile is 256 weight rows x up to 152 tokens of one expert. One warp fetches both into a ring of stages of 128 columns each; two
// warpgroups multiply 128 rows each and go their own way, so that one's epilogue runs beside the other's products. There is one sum per
// output: instead of adding scaled partial sums it is kept in units of the scales of the 128 columns at hand, and multiplied by the ratio
// of two scales on the way to the next. Three warps make those ratios. Row order of the weights: `kernels/experts_prefill.py`.
#include "hopper.cuh"

namespace {

constexpr int STAGES = 4, QUEUE = 4;
constexpr int CLUSTER = 2;  // blocks that share their weight rows and have a part of the expert's tokens each
constexpr int MAX_EXPERTS = 256, MAX_WIDTH = 152;
constexpr int LATE = 32;  // experts whose last row block comes at the very end
constexpr int FACTORS = 40;  // of a thread's tokens, at most; a multiple of 4
constexpr int WARPGROUPS = 2, ROWS = 128;  // of a warpgroup
constexpr int THREADS = 128 * (1 + WARPGROUPS), CONSUMER_WARPS = 4 * WARPGROUPS;
constexpr int SCALE_WARPS = 3, LANE_TOKENS = 2;  // the warps after the first one, tokens of a lane
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = 224;
constexpr float LEAST_SCALE = 8.67361737988403547e-19f;  // 2^-60: what lies below adds nothing, and ratios stay finite
constexpr long long PATIENCE_NS = 2000000000;

// Tokens of a tile that there is code for.
constexpr int WIDTHS[] = {16, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152};
constexpr int NUM_WIDTHS = sizeof(WIDTHS) / sizeof(WIDTHS[0]);
__device__ __forceinline__ int width_index(int tokens) { return tokens <= 64 ? max((tokens + 15) / 16 - 1, 0) : (tokens + 7) / 8 - 5; }
__device__ __forceinline__ int width_of(int index) { return index < 4 ? 16 * (index + 1) : 8 * (index + 5); }

struct Plan {
  CUtensorMap weights;             // [experts, rows, columns] FP8
  CUtensorMap tokens[NUM_WIDTHS];  // [buffer rows, columns] FP8, boxes of as many rows
  const float* scales;             // [blocks, scale_stride], of tokens
  const float* weight_scales;      // [experts, row_blocks, blocks]
  const int32_t* ends;             // [experts], one past each expert's last row
  void* out;                       // gate/up: [buffer rows, out_columns] FP8; down: bf16
  float* out_scales;               // gate/up: [out_columns / 128, out_scale_stride]
  int32_t* counters;               // [groups of tiles handed out, clusters that are done], zero before and after
  int experts, alignment, buffer_rows, rows, blocks, scale_stride;
  int out_columns, out_scale_stride;
  int intermediate, bias_columns;  // gate/up
  float alpha, limit;
};

struct Tile {
  int expert, row_block;    // of 256 weight rows
  int token, count, width;  // first row of the buffer, tokens, index into WIDTHS
};

struct Shared {
  unsigned char weights[STAGES][WARPGROUPS * ROWS * 128];
  unsigned char tokens[STAGES][MAX_WIDTH * 128];
  alignas(16) float factors[STAGES][WARPGROUPS][4 * FACTORS];  // what a sum is multiplied by after this stage
  uint32_t maxima[WARPGROUPS][4][MAX_WIDTH / 2];  // of a warp's rows, two tokens' bf16 each
  float inverse[WARPGROUPS][MAX_WIDTH];
  uint64_t full[STAGES], empty[STAGES], group_full[QUEUE], group_empty[QUEUE];
  int queue[QUEUE];  // numbers of groups of tiles
  int first_group[MAX_EXPERTS + LATE + 1];  // of an entry of the list
  int first_token[MAX_EXPERTS], count[MAX_EXPERTS];
  volatile int is_lost;  // a consumer has waited too long
};

// A place in a ring of `SIZE`, and the parity of its turn.
template <int SIZE>
struct Place {
  uint32_t turn = 0;
  __device__ __forceinline__ int slot() const { return turn % SIZE; }
  __device__ __forceinline__ uint32_t parity() const { return turn / SIZE % 2; }
};

// The copying side ends the kernel with an error where it would hang; a trap among the consumers would cost them their registers.
__device__ __forceinline__ void wait_or_end(const Shared& s, uint64_t* barrier, uint32_t parity) {
  if (barrier_passed(barrier, parity)) return;
  const long long start = time_ns();
  while (!barrier_passed(barrier, parity))
    if (s.is_lost || time_ns() - start > PATIENCE_NS) end_with_error();
}
__device__ __forceinline__ void wait_or_give_up(Shared& s, uint64_t* barrier, uint32_t parity) {
  if (barrier_passed(barrier, parity)) return;
  const long long start = time_ns();
  while (!barrier_passed(barrier, parity) && !s.is_lost)
    if (time_ns() - start > PATIENCE_NS) s.is_lost = 1;
}

// Groups of tiles that the blocks of a cluster take together.
__device__ __forceinline__ int groups_of(int count) { return (count + CLUSTER * MAX_WIDTH - 1) / (CLUSTER * MAX_WIDTH); }

// The order of work: entry e is expert e with its row blocks, groups with the same weights side by side. The last row block, which is smaller,
// of the last experts has entries of its own at the end, where it evens out what the clusters have done.
struct Entry {
  int expert, first_row_block, row_blocks;
  __device__ __forceinline__ Entry(int entry, int experts, int all_row_blocks) {
    const int late = min(LATE, experts), is_late = entry >= experts;
    expert = is_late ? entry - late : entry;
    first_row_block = is_late ? all_row_blocks - 1 : 0;
    row_blocks = is_late ? 1 : expert >= experts - late ? all_row_blocks - 1 : all_row_blocks;
  }
};
__device__ __forceinline__ int entries(int experts) { return experts + min(LATE, experts); }

__device__ __forceinline__ void list_work(Shared& s, const Plan& plan, int row_blocks) {
  for (int e = threadIdx.x; e < plan.experts; e += THREADS) {
    const int before = e > 0 ? plan.ends[e - 1] : 0;
    const int first = (before + plan.alignment - 1) / plan.alignment * plan.alignment;
    s.first_token[e] = first;
    s.count[e] = max(plan.ends[e] - first, 0);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int EACH = (MAX_EXPERTS + LATE) / 32;
    const int count = entries(plan.experts);
    int groups[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int number = threadIdx.x * EACH + i;
      const Entry entry(number, plan.experts, row_blocks);
      groups[i] = number < count ? groups_of(s.count[entry.expert]) * entry.row_blocks : 0;
      sum += groups[i];
    }
    int end = sum;
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, end, step);
      if (threadIdx.x >= step) end += other;
    }
    int first = end - sum;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int number = threadIdx.x * EACH + i;
      if (number <= count) s.first_group[number] = first;
      first += groups[i];
    }
    if (threadIdx.x == 31 && count == 32 * EACH) s.first_group[count] = first;
  }
  __syncthreads();
}

// This block's tile of a group.
__device__ __forceinline__ bool tile_at(const Shared& s, const Plan& plan, int number, int row_blocks, Tile& tile) {
  int low = 0, high = entries(plan.experts);  // first_group[low] <= number < first_group[high]
  if (number >= s.first_group[high]) return false;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.first_group[middle] <= number) low = middle;
    else high = middle;
  }
  const Entry entry(low, plan.experts, row_blocks);
  const int inside = number - s.first_group[low], count = s.count[entry.expert], groups = groups_of(count), tiles = groups * CLUSTER;
  const int part = inside % groups * CLUSTER + (CLUSTER > 1 ? static_cast<int>(blockIdx.x % CLUSTER) : 0);
  const int eights = (count + 7) / 8, each = eights / tiles, more = eights % tiles;
  const int begin = 8 * (part * each + min(part, more)), end = begin + 8 * (each + (part < more ? 1 : 0));
  tile = {entry.expert, entry.first_row_block + inside / groups, s.first_token[entry.expert] + begin, min(end, count) - begin,
          width_index(end - begin)};
  return true;
}

// One block of a cluster hands out groups of tiles, whoever is early takes more; all roles of both blocks read the same numbers in turn.
__device__ __forceinline__ void hand_out(Shared& s, const Place<QUEUE>& place, int number) {
  wait_or_end(s, &s.group_empty[place.slot()], place.parity() ^ 1);
  barrier_expect(&s.group_full[place.slot()], sizeof(int));
#pragma unroll
  for (int rank = 0; rank < CLUSTER; rank++) send(&s.queue[place.slot()], number, &s.group_full[place.slot()], rank);
}

// What the two products differ in: which rows a warpgroup has, and in how many passes over the columns.
template <bool IS_GATE_UP>
struct Shape {
  // A warpgroup of gate/up makes 128 columns of the hidden row, one group of its FP8 scales, in two passes of 64.
  static constexpr int PASSES = IS_GATE_UP ? 2 : 1;
  static constexpr int TILE_ROWS = PASSES * WARPGROUPS * ROWS;
  __device__ static __forceinline__ int row(const Tile& tile, int warpgroup, int pass) {
    return tile.row_block * TILE_ROWS + (warpgroup * PASSES + pass) * ROWS;
  }
  __device__ static __forceinline__ int row_blocks(const Plan& plan) {
    const int rows = IS_GATE_UP ? 2 * plan.out_columns : plan.rows;
    return (rows + TILE_ROWS - 1) / TILE_ROWS;
  }
};

template <bool IS_GATE_UP>
__device__ __forceinline__ void fetch(Shared& s, const Plan& plan) {
  using Shape = Shape<IS_GATE_UP>;
  const int row_blocks = Shape::row_blocks(plan), rank = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER;
  Place<STAGES> stage;
  Place<QUEUE> place;
  int number = blockIdx.x / CLUSTER;
  for (Tile tile;; place.turn++) {
    if (rank == 0) {
      hand_out(s, place, number);
    } else {
      barrier_expect(&s.group_full[place.slot()], sizeof(int));
      wait_or_end(s, &s.group_full[place.slot()], place.parity());
      number = s.queue[place.slot()];
      barrier_arrive_at(&s.group_empty[place.slot()], 0);
    }
    if (!tile_at(s, plan, number, row_blocks, tile)) break;
    if (rank == 0) number = clusters + atomicAdd(plan.counters, 1);
    const int width = width_of(tile.width);
    for (int pass = 0; pass < Shape::PASSES; pass++) {
      int parts = 0;
      while (parts < WARPGROUPS && Shape::row(tile, parts, pass) < plan.rows) parts++;
      if (parts == 0) break;
      for (int k = 0; k < plan.blocks; k++) {
        wait_or_end(s, &s.empty[stage.slot()], stage.parity() ^ 1);
        uint64_t* full = &s.full[stage.slot()];
        barrier_expect(full, parts * ROWS * 128 + width * 128);
        for (int part = 0; part < parts; part++) {
          unsigned char* to = s.weights[stage.slot()] + part * ROWS * 128;
          const int row = Shape::row(tile, part, pass);
          if constexpr (CLUSTER == 1) copy_box(to, plan.weights, 128 * k, row, tile.expert, full);
          else if (part % CLUSTER == rank) copy_box_to_both(to, plan.weights, 128 * k, row, tile.expert, full);
        }
        copy_box(s.tokens[stage.slot()], plan.tokens[tile.width], 128 * k, tile.token, 0, full);
        stage.turn++;
      }
    }
  }
  if (rank > 0 || atomicAdd(plan.counters + 1, 1) + 1 < clusters) return;
  plan.counters[0] = 0;  // for the next launch
  plan.counters[1] = 0;
}

// Where a token's factor lies: a thread's tokens, 8 apart in pairs, are neighbours.
__device__ __forceinline__ int factor_place(int token) { return token % 8 / 2 * FACTORS + token / 8 * 2 + token % 2; }

// A lane's scales of some columns: its tokens' and the two row blocks'.
struct Scales {
  float token[LANE_TOKENS], weight[WARPGROUPS];
};

template <bool IS_GATE_UP>
__device__ __forceinline__ void make_factors(Shared& s, const Plan& plan, int warp, int lane) {
  using Shape = Shape<IS_GATE_UP>;
  constexpr int AHEAD = 3;
  const int row_blocks = (plan.rows + ROWS - 1) / ROWS;
  Place<STAGES> stage;
  Place<QUEUE> place;
  for (Tile tile;; place.turn++) {
    wait_or_end(s, &s.group_full[place.slot()], place.parity());
    const int number = s.queue[place.slot()];
    __syncwarp();
    if (lane == 0) barrier_arrive_at(&s.group_empty[place.slot()], 0);
    if (!tile_at(s, plan, number, Shape::row_blocks(plan), tile)) return;
    const int mine = warp * 32 + lane, width = width_of(tile.width);
    for (int pass = 0; pass < Shape::PASSES; pass++) {
      if (Shape::row(tile, 0, pass) >= plan.rows) break;
      const float* token_scales[LANE_TOKENS];
      const float* weight_scales[WARPGROUPS];
#pragma unroll
      for (int i = 0; i < LANE_TOKENS; i++)
        token_scales[i] = plan.scales + min(tile.token + mine + i * SCALE_WARPS * 32, plan.buffer_rows - 1);
#pragma unroll
      for (int i = 0; i < WARPGROUPS; i++) {
        const int row_block = min(Shape::row(tile, i, pass) / ROWS, row_blocks - 1);
        weight_scales[i] = plan.weight_scales + (static_cast<size_t>(tile.expert) * row_blocks + row_block) * plan.blocks;
      }
      Scales ring[AHEAD];
      auto load = [&](Scales& to, int k) {
        if (k >= plan.blocks) return;
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++) to.token[i] = __ldg(token_scales[i] + static_cast<size_t>(k) * plan.scale_stride);
#pragma unroll
        for (int i = 0; i < WARPGROUPS; i++) to.weight[i] = __ldg(weight_scales[i] + k);
      };
#pragma unroll
      for (int k = 0; k < AHEAD - 1; k++) load(ring[k], k);
      for (int base = 0; base < plan.blocks; base += AHEAD) {
#pragma unroll
        for (int step = 0; step < AHEAD; step++) {
          const int k = base + step;
          if (k >= plan.blocks) break;
          load(ring[(step + AHEAD - 1) % AHEAD], k + AHEAD - 1);
          const Scales &here = ring[step], &there = ring[(step + 1) % AHEAD];
          const bool is_last = k + 1 == plan.blocks;
          wait_or_end(s, &s.empty[stage.slot()], stage.parity() ^ 1);
#pragma unroll
          for (int i = 0; i < LANE_TOKENS; i++) {
            const int token = mine + i * SCALE_WARPS * 32;
            const float ratio = max(here.token[i], LEAST_SCALE) * (is_last ? 1.0f : __fdividef(1.0f, max(there.token[i], LEAST_SCALE)));
            if (token >= width) break;
#pragma unroll
            for (int w = 0; w < WARPGROUPS; w++)
              s.factors[stage.slot()][w][factor_place(token)] = ratio * (is_last ? here.weight[w] : __fdividef(here.weight[w], there.weight[w]));
          }
          __syncwarp();
          if (lane == 0) barrier_arrive(&s.full[stage.slot()]);
          stage.turn++;
        }
      }
    }
  }
}

// Multiplies the sums of half a warpgroup's rows. Loads go ahead of their use in batches, which is all that registers allow.
template <int N>
struct Factors {
  static constexpr int BATCH = 3;  // of two times two tokens
  float4 batch[BATCH];
  __device__ __forceinline__ void load(const float4* factors, int first) {
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (2 * (first + i) < N / 8) batch[i] = factors[first + i];
  }
  __device__ __forceinline__ void apply(float (&sum)[N / 2], int first) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int j = 2 * (first + i);
      const float f[4] = {batch[i].x, batch[i].y, batch[i].z, batch[i].w};
#pragma unroll
      for (int x = 0; x < 8; x++)
        if (j + x / 4 < N / 8) sum[4 * j + x] *= f[x / 4 * 2 + x % 2];
    }
  }
  // The first batch is loaded already.
  __device__ __forceinline__ void apply_all(float (&sum)[N / 2], const float4* factors) {
    apply(sum, 0);
#pragma unroll
    for (int first = BATCH; 2 * first < N / 8; first += BATCH) {
      load(factors, first);
      apply(sum, first);
    }
  }
};

// This warpgroup's 64 * HALVES rows times N tokens over all columns, scales applied. HALVES 0: only keeps step with the ring.
template <int N, int HALVES>
__device__ __forceinline__ void multiply(Shared& s, Place<STAGES>& stage, float (&sum)[2][N / 2], int warpgroup, int blocks) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[h][i] = 0.0f;
#pragma unroll 1
  for (int k = 0; k < blocks; k++) {
    const int slot = uniform(stage.slot());
    const uint64_t a = operand(s.weights[slot] + warpgroup * ROWS * 128), b = operand(s.tokens[slot]);
    wait_or_give_up(s, &s.full[slot], stage.parity());
    if constexpr (HALVES > 0) {
      pin(sum[0]);
      pin(sum[1]);
      product_fence();
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
#pragma unroll
        for (int i = 0; i < 4; i++) product<N>(sum[h], a + h * (64 * 128 / 16) + 2 * i, b + 2 * i);
        product_commit();
      }
      const float4* factors = reinterpret_cast<const float4*>(s.factors[slot][warpgroup] + FACTORS * (lane % 4));
      Factors<N> ahead;
      ahead.load(factors, 0);
      if constexpr (HALVES == 2) {
        product_wait<1>();
        pin(sum[0]);
        ahead.apply_all(sum[0], factors);
        ahead.load(factors, 0);
        pin(sum[0]);
        product_wait<0>();
        pin(sum[1]);
        ahead.apply_all(sum[1], factors);
      } else {
        product_wait<0>();
        pin(sum[0]);
        ahead.apply_all(sum[0], factors);
      }
    }
    __syncwarp();
    if constexpr (CLUSTER == 1) {
      if (lane == 0) barrier_arrive(&s.empty[slot]);
    } else if (lane < CLUSTER) {
      barrier_arrive_at(&s.empty[slot], lane);  // both blocks' copies write here
    }
    stage.turn++;
  }
}

__device__ __forceinline__ float swiglu(float gate, float up, const Plan& plan) {
  gate = min(gate, plan.limit);
  up = min(max(up, -plan.limit), plan.limit);
  const float gated = gate * reciprocal_fast(1.0f + exp2_fast(gate * (plan.alpha * -1.4426950408889634f)));
  return up * gated + gated;
}

// The scale of a token's group, the rules of `fp8_quant_rows_bias_ref`.
__device__ __forceinline__ float group_scale(float largest, bool has_bias) {
  const float scale = largest * (1.0f / 448.0f);
  if (has_bias) return __uint_as_float((__float_as_uint(max(scale, 0.00390625f)) + 0x7FFFFFu) & 0xFF800000u);
  return scale > 0.0f ? scale : 1.0f;
}

template <int N>
__device__ __forceinline__ void gate_up_tile(Shared& s, const Plan& plan, Place<STAGES>& stage, const Tile& tile) {
  using Shape = Shape<true>;
  const int warpgroup = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4;
  uint32_t hidden[2][N / 4];  // of a pass: two columns of a token each, bf16
#pragma unroll
  for (int i = 0; i < N / 4; i++) hidden[0][i] = hidden[1][i] = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) hidden[0][i] = hidden[1][i], hidden[1][i] = 0;
    if (Shape::row(tile, 0, pass) >= plan.rows) continue;
    float sum[2][N / 2];
    if (Shape::row(tile, warpgroup, pass) >= plan.rows) {
      multiply<N, 0>(s, stage, sum, warpgroup, plan.blocks);
      continue;
    }
    multiply<N, 2>(s, stage, sum, warpgroup, plan.blocks);
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int b = 0; b < 2; b++)
        hidden[1][2 * j + b] = bf16x2_pack(swiglu(sum[0][4 * j + b], sum[0][4 * j + 2 + b], plan),
                                           swiglu(sum[1][4 * j + b], sum[1][4 * j + 2 + b], plan));
  }
  const int group = tile.row_block * WARPGROUPS + warpgroup;
  if (128 * group >= plan.out_columns) return;
  const bool has_bias = plan.bias_columns > 0 && 128 * (group + 1) == plan.out_columns;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    uint32_t largest[2];
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const uint32_t both = max_16x2(hidden[0][2 * j + b] & 0x7FFF7FFFu, hidden[1][2 * j + b] & 0x7FFF7FFFu);
      largest[b] = max(both & 0xFFFFu, both >> 16);
    }
    uint32_t x = largest[0] | largest[1] << 16;
#pragma unroll
    for (int step = 4; step < 32; step <<= 1) x = max_16x2(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    if (g == 0) s.maxima[warpgroup][warp][4 * j + c] = x;
  }
  meet<128>(1 + warpgroup);
  for (int n = thread; n < N; n += 128) {
    uint32_t x = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) x = max(x, s.maxima[warpgroup][w][n / 2] >> (16 * (n % 2)) & 0xFFFFu);
    const float scale = group_scale(__uint_as_float(x << 16), has_bias);
    s.inverse[warpgroup][n] = 1.0f / scale;
    if (n < tile.count) plan.out_scales[static_cast<size_t>(group) * plan.out_scale_stride + tile.token + n] = scale;
  }
  meet<128>(1 + warpgroup);
  const int column = 128 * group + 16 * warp + 4 * c;
  unsigned char* out = static_cast<unsigned char*>(plan.out) + static_cast<size_t>(tile.token + g) * plan.out_columns + column;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float2 inverse = *reinterpret_cast<const float2*>(s.inverse[warpgroup] + 8 * j + 2 * c);
#pragma unroll
    for (int pass = 0; pass < 2; pass++) {
      const uint32_t x = hidden[pass][2 * j], y = hidden[pass][2 * j + 1];
      const uint32_t low = fp8x2_pack(bf16_low(x) * inverse.x, bf16_high(x) * inverse.x);
      const uint32_t high = fp8x2_pack(bf16_low(y) * inverse.y, bf16_high(y) * inverse.y);
      uint32_t word = transpose_8x8(low | high << 16);
      const int first = column + 64 * pass;
      if (has_bias && first >= plan.intermediate && first < plan.intermediate + plan.bias_columns) {
        const float ones = s.inverse[warpgroup][8 * j + g];
        word = fp8x2_pack(ones, ones) * 0x10001u;
      }
      if (8 * j + g < tile.count) *reinterpret_cast<uint32_t*>(out + static_cast<size_t>(8 * j) * plan.out_columns + 64 * pass) = word;
    }
  }
}

template <int N>
__device__ __forceinline__ void down_tile(Shared& s, const Plan& plan, Place<STAGES>& stage, const Tile& tile) {
  const int warpgroup = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int row = Shape<false>::row(tile, warpgroup, 0);
  float sum[2][N / 2];
  if (row + 64 < plan.rows) multiply<N, 2>(s, stage, sum, warpgroup, plan.blocks);
  else if (row < plan.rows) multiply<N, 1>(s, stage, sum, warpgroup, plan.blocks);
  else multiply<N, 0>(s, stage, sum, warpgroup, plan.blocks);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int column = row + 64 * h + 16 * warp + 4 * c;
    uint16_t* out = static_cast<uint16_t*>(plan.out) + static_cast<size_t>(tile.token + g) * plan.out_columns + column;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const uint32_t x = transpose_8x8(bf16x2_pack(sum[h][4 * j], sum[h][4 * j + 1]));
      const uint32_t y = transpose_8x8(bf16x2_pack(sum[h][4 * j + 2], sum[h][4 * j + 3]));
      if (column < plan.out_columns && 8 * j + g < tile.count)
        *reinterpret_cast<uint2*>(out + static_cast<size_t>(8 * j) * plan.out_columns) = make_uint2(x, y);
    }
  }
}

template <bool IS_GATE_UP, int INDEX>
__device__ __forceinline__ void compute_tile(Shared& s, const Plan& plan, Place<STAGES>& stage, const Tile& tile) {
  if constexpr (INDEX < NUM_WIDTHS) {
    if (tile.width != INDEX) return compute_tile<IS_GATE_UP, INDEX + 1>(s, plan, stage, tile);
    if constexpr (IS_GATE_UP) gate_up_tile<WIDTHS[INDEX]>(s, plan, stage, tile);
    else down_tile<WIDTHS[INDEX]>(s, plan, stage, tile);
  }
}

template <bool IS_GATE_UP>
__device__ __forceinline__ void compute(Shared& s, const Plan& plan) {
  Place<STAGES> stage;
  Place<QUEUE> place;
  for (Tile tile;; place.turn++) {
    wait_or_give_up(s, &s.group_full[place.slot()], place.parity());
    const int number = s.queue[place.slot()];
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive_at(&s.group_empty[place.slot()], 0);
    if (s.is_lost || !tile_at(s, plan, number, Shape<IS_GATE_UP>::row_blocks(plan), tile)) return;
    compute_tile<IS_GATE_UP, 0>(s, plan, stage, tile);
  }
}

template <bool IS_GATE_UP>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) experts_kernel(const __grid_constant__ Plan plan) {
  DYNAMIC_SHARED(memory);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.full[i], 1 + SCALE_WARPS);
      barrier_init(&s.empty[i], CONSUMER_WARPS * CLUSTER);
    }
    for (int i = 0; i < QUEUE; i++) {
      barrier_init(&s.group_full[i], 1);
      barrier_init(&s.group_empty[i], CLUSTER * (SCALE_WARPS + CONSUMER_WARPS + 1) - 1);
    }
    barrier_init_fence();
    s.is_lost = 0;
  }
  list_work(s, plan, Shape<IS_GATE_UP>::row_blocks(plan));
  if constexpr (CLUSTER > 1) cluster_meet();
  if (threadIdx.x < 128) {
    leave_registers<PRODUCER_REGISTERS>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp > 0) make_factors<IS_GATE_UP>(s, plan, warp - 1, lane);
    else if (lane == 0) fetch<IS_GATE_UP>(s, plan);
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_meet();  // no block ends while another writes to it
  } else {
    take_registers<CONSUMER_REGISTERS>();
    compute<IS_GATE_UP>(s, plan);
    if constexpr (CLUSTER > 1) cluster_meet();
  }
}

// Returns: 0, a CUDA error, or -1 where there is no instance for the shape.
template <bool IS_GATE_UP>
int start(Plan& plan, const void* q, const void* weights, int multiprocessors, void* stream) {
  const int grid = multiprocessors / CLUSTER * CLUSTER;
  if (plan.experts > MAX_EXPERTS || plan.blocks < 1) return -1;
  if (plan.buffer_rows == 0 || plan.rows == 0) return 0;
  int error = describe_rows(&plan.weights, weights, 128 * plan.blocks, plan.rows, plan.experts, ROWS);
  for (int i = 0; i < NUM_WIDTHS && error == 0; i++)
    error = describe_rows(&plan.tokens[i], q, 128 * plan.blocks, plan.buffer_rows, 1, WIDTHS[i]);
  if (error != 0) return error;
  constexpr int shared_bytes = sizeof(Shared);
#ifdef TANDEM_EMULATE
  emulation::run(dim3(grid), THREADS, shared_bytes, [&] { experts_kernel<IS_GATE_UP>(plan); }, CLUSTER);
  return 0;
#else
  static_assert(shared_bytes <= 227 * 1024, "more shared memory than a block may have");
  error = static_cast<int>(cudaFuncSetAttribute(experts_kernel<IS_GATE_UP>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  if (error != 0) return error;
  experts_kernel<IS_GATE_UP><<<grid, THREADS, shared_bytes, static_cast<cudaStream_t>(stream)>>>(plan);
  return static_cast<int>(cudaGetLastError());
#endif
}

}  // namespace

extern "C" int experts_gate_up(const void* q, const float* scales, const int32_t* ends, const void* weights, const float* weight_scales,
                               void* out, float* out_scales, int32_t* counters, int buffer_rows, int scale_stride, int experts, int alignment,
                               int rows, int blocks, int out_columns, int out_scale_stride, int intermediate, int bias_columns, float alpha,
                               float limit, int multiprocessors, void* stream) {
  Plan plan = {{}, {}, scales, weight_scales, ends, out, out_scales, counters, experts, alignment, buffer_rows, rows, blocks, scale_stride,
               out_columns, out_scale_stride, intermediate, bias_columns, alpha, limit};
  return start<true>(plan, q, weights, multiprocessors, stream);
}

extern "C" int experts_down(const void* q, const float* scales, const int32_t* ends, const void* weights, const float* weight_scales,
                            void* out, int32_t* counters, int buffer_rows, int scale_stride, int experts, int alignment, int rows, int blocks,
                            int out_columns, int multiprocessors, void* stream) {
  Plan plan = {{}, {}, scales, weight_scales, ends, out, nullptr, counters, experts, alignment, buffer_rows, rows, blocks, scale_stride,
               out_columns, 0, 0, 0, 0.0f, 0.0f};
  return start<false>(plan, q, weights, multiprocessors, stream);
}
