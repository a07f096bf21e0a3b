// The FP8 expert products of prefill, one persistent launch each: gate/up with SwiGLU and quantisation behind it, and down. Weight rows are
// the 64-row operand of the tensor cores and tokens the columns, so that an expert's tokens are padded to 8 and not to a tile of 128.
//
// A block's tile is 256 weight rows x up to `MAX_WIDTH` tokens of one expert. One thread fetches both into a ring of stages of 128 columns
// each; two warpgroups multiply 128 rows each and go their own way. The two blocks of a cluster share weight rows or tokens, and each fetches
// half of what they share for both. A row of weights and a token have one scale each (`docs/decisions/even-scales.md`), so sums stay in the
// tensor cores' registers over all columns: the next stage's products start before the last one's are done, and scales are applied once at
// the end. Row order of the weights: `kernels/experts_prefill.py`.
#include "hopper.cuh"

namespace {

constexpr int STAGES = 4, QUEUE = 2;
constexpr int CLUSTER = 2;
constexpr int MAX_EXPERTS = 128;
constexpr int LATE = 32;  // experts whose last row block comes at the very end
constexpr int WARPGROUPS = 2, ROWS = 128, BLOCK_ROWS = WARPGROUPS * ROWS;  // of a warpgroup, of a block
constexpr int THREADS = 128 * (1 + WARPGROUPS), CONSUMER_WARPS = 4 * WARPGROUPS;
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
// A block never has more registers than it was launched with, which is 168 a thread: taking more waits for ever.
static_assert(128 * (PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS) <= 65536 / THREADS / 8 * 8 * THREADS);

// Tokens of a tile that there is code for.
constexpr int WIDTHS[] = {16, 32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176};
constexpr int NUM_WIDTHS = sizeof(WIDTHS) / sizeof(WIDTHS[0]), MAX_WIDTH = WIDTHS[NUM_WIDTHS - 1];
__device__ __forceinline__ int width_index(int tokens) { return tokens <= 64 ? max((tokens + 15) / 16 - 1, 0) : (tokens + 7) / 8 - 5; }
__device__ __forceinline__ int width_of(int index) { return index < 4 ? 16 * (index + 1) : 8 * (index + 5); }

// How the two blocks of a cluster divide a tile: the same weight rows and half of the tokens each, or the same tokens and 256 rows each.
template <bool SPLIT_TOKENS>
struct Mode {
  static constexpr int TILE_ROWS = SPLIT_TOKENS ? BLOCK_ROWS : CLUSTER * BLOCK_ROWS, TILE_PARTS = SPLIT_TOKENS ? CLUSTER : 1;
};

struct Plan {
  CUtensorMap weights;             // [experts, rows, columns] FP8
  CUtensorMap tokens[NUM_WIDTHS];  // [buffer rows, columns] FP8, boxes of as many rows
  const float* scales;             // gate/up: [buffer rows], of tokens
  const float* weight_scales;      // [experts, row blocks, blocks], the same for all blocks
  const int32_t* ends;             // [experts], one past each expert's last row
  void* out;                       // gate/up: [buffer rows, out_columns] FP8; down: bf16
  int32_t* counters;               // [groups of tiles handed out, clusters that are done], zero before and after
  int experts, buffer_rows, rows, blocks, out_columns;
  int intermediate, bias_columns;  // gate/up
  float alpha, limit;
  float hidden_scale;
};

struct Tile {
  int expert;               // -1: there is no more
  int row;                  // first of the block's 256 weight rows
  int is_empty;             // none of the cluster's rows exist
  int token, count, width;  // first row of the buffer, tokens, index into WIDTHS
};

struct Shared {
  unsigned char weights[STAGES][WARPGROUPS * ROWS * 128];
  unsigned char tokens[STAGES][MAX_WIDTH * 128];
  alignas(16) float scales[2][WARPGROUPS][MAX_WIDTH];  // of the products of two tiles, in turn
  uint64_t full[STAGES], empty[STAGES], tile_full[QUEUE], tile_empty[QUEUE], number_full, number_empty;
  Tile tiles[QUEUE];
  int number;  // of a group of tiles
  int first_group[MAX_EXPERTS + LATE + 1];  // of an entry of the list
  int first_token[MAX_EXPERTS];
  int16_t eights[MAX_EXPERTS];  // tokens, in eights
  volatile int is_lost;         // a consumer has waited too long
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
  const long long start = cycles();
  while (!barrier_passed(barrier, parity))
    if (s.is_lost || cycles() - start > PATIENCE) end_with_error();
}
__device__ __forceinline__ void wait_or_give_up(Shared& s, uint64_t* barrier, uint32_t parity) {
  if (barrier_passed(barrier, parity)) return;
  const long long start = cycles();
  while (!barrier_passed(barrier, parity) && !s.is_lost)
    if (cycles() - start > PATIENCE) s.is_lost = 1;
}

// Groups of tiles that the blocks of a cluster take together.
template <class M>
__device__ __forceinline__ int groups_of(int eights) {
  constexpr int MOST = M::TILE_PARTS * MAX_WIDTH / 8;
  return (eights + MOST - 1) / MOST;
}

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

template <class M>
__device__ __forceinline__ void list_work(Shared& s, const Plan& plan, int row_blocks) {
  for (int e = threadIdx.x; e < plan.experts; e += THREADS) {
    const int first = e > 0 ? plan.ends[e - 1] : 0;
    s.first_token[e] = first;
    s.eights[e] = static_cast<int16_t>((plan.ends[e] - first + 7) / 8);
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
      groups[i] = number < count ? groups_of<M>(s.eights[entry.expert]) * entry.row_blocks : 0;
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
template <class M>
__device__ __forceinline__ Tile tile_at(const Shared& s, const Plan& plan, int number, int row_blocks) {
  int low = 0, high = entries(plan.experts);  // first_group[low] <= number < first_group[high]
  if (number >= s.first_group[high]) return {-1, 0, 0, 0, 0, 0};
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (s.first_group[middle] <= number) low = middle;
    else high = middle;
  }
  const Entry entry(low, plan.experts, row_blocks);
  const int inside = number - s.first_group[low], eights = s.eights[entry.expert], groups = groups_of<M>(eights), tiles = groups * M::TILE_PARTS;
  const int rank = cluster_rank(), part = inside % groups * M::TILE_PARTS + rank % M::TILE_PARTS;
  const int each = eights / tiles, more = eights % tiles;
  const int begin = 8 * (part * each + min(part, more)), end = begin + 8 * (each + (part < more ? 1 : 0));
  const int first = s.first_token[entry.expert], row = (entry.first_row_block + inside / groups) * M::TILE_ROWS;
  return {entry.expert, row + (M::TILE_ROWS > BLOCK_ROWS ? rank * BLOCK_ROWS : 0), row >= plan.rows, first + begin, min(first + end, plan.ends[entry.expert]) - first - begin,
          width_index(end - begin)};
}

// One block of a cluster hands out groups of tiles, whoever is early takes more; all blocks of it read the same numbers in turn.
__device__ __forceinline__ int same_number(Shared& s, const Place<1>& place, int number) {
  barrier_expect(&s.number_full, sizeof(int));
  if (cluster_rank() == 0) {
    wait_or_end(s, &s.number_empty, place.parity() ^ 1);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) send(&s.number, number, &s.number_full, rank);
  }
  wait_or_end(s, &s.number_full, place.parity());
  number = s.number;
  barrier_arrive_at(&s.number_empty, 0);
  return number;
}

template <bool IS_GATE_UP>
__host__ __device__ __forceinline__ int all_rows(const Plan& plan) { return IS_GATE_UP ? 2 * plan.out_columns : plan.rows; }

template <class M, bool IS_GATE_UP>
__device__ __forceinline__ void fetch(Shared& s, const Plan& plan) {
  const int row_blocks = (all_rows<IS_GATE_UP>(plan) + M::TILE_ROWS - 1) / M::TILE_ROWS, clusters = gridDim.x / CLUSTER;
  const int rank = cluster_rank();
  Place<STAGES> stage;
  Place<QUEUE> queued;
  Place<1> place;
  int next = rank == 0 ? atomicAdd(plan.counters, 1) : 0;  // a cluster that comes late finds nothing left
  for (;; place.turn++, queued.turn++) {
    const int number = same_number(s, place, next);
    const Tile tile = tile_at<M>(s, plan, number, row_blocks);
    wait_or_end(s, &s.tile_empty[queued.slot()], queued.parity() ^ 1);
    s.tiles[queued.slot()] = tile;
    barrier_arrive(&s.tile_full[queued.slot()]);
    if (tile.expert < 0) break;
    if (rank == 0) next = atomicAdd(plan.counters, 1);
    if (tile.is_empty) continue;
    const int width = width_of(tile.width);
    int parts = 0;
    while (parts < WARPGROUPS && tile.row + parts * ROWS < plan.rows) parts++;
    for (int k = 0; k < plan.blocks; k++, stage.turn++) {
      const int slot = stage.slot();
      wait_or_end(s, &s.empty[slot], stage.parity() ^ 1);
      uint64_t* full = &s.full[slot];
      barrier_expect(full, parts * ROWS * 128 + width * 128);
      for (int part = 0; part < parts; part++) {
        unsigned char* to = s.weights[slot] + part * ROWS * 128;
        const int row = tile.row + part * ROWS;
        if constexpr (M::TILE_PARTS == 1) copy_box(to, plan.weights, 128 * k, row, tile.expert, full);
        else if (part == rank) copy_box_to_both(to, plan.weights, 128 * k, row, tile.expert, full);
      }
      if constexpr (M::TILE_PARTS > 1) copy_box(s.tokens[slot], plan.tokens[tile.width], 128 * k, tile.token, 0, full);
      else if (k % CLUSTER == rank) copy_box_to_both(s.tokens[slot], plan.tokens[tile.width], 128 * k, tile.token, 0, full);
    }
  }
  if (rank > 0 || atomicAdd(plan.counters + 1, 1) + 1 < clusters) return;
  plan.counters[0] = 0;  // for the next launch
  plan.counters[1] = 0;
}

// A warp has read a stage: both blocks are told, since both copy into it.
__device__ __forceinline__ void release(Shared& s, int slot) {
  const int lane = threadIdx.x % 32;
  __syncwarp();
  if (lane < CLUSTER) barrier_arrive_at(&s.empty[slot], lane);
}

// This warpgroup's 64 * HALVES rows times N tokens over all columns. HALVES 0: only keeps step with the ring.
template <int N, int HALVES>
__device__ __forceinline__ void multiply(Shared& s, Place<STAGES>& stage, float (&sum)[2][N / 2], int warpgroup, int blocks) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum[h][i] = 0.0f;
  int before = -1;
#pragma unroll 1
  for (int k = 0; k < blocks; k++, stage.turn++) {
    const int slot = uniform(stage.slot());
    const uint64_t a = operand(s.weights[slot] + warpgroup * ROWS * 128), b = operand(s.tokens[slot]);
    wait_or_give_up(s, &s.full[slot], stage.parity());
    if constexpr (HALVES > 0) {
      pin(sum[0]);
      pin(sum[1]);
      product_fence();
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) product<N>(sum[h], a + h * (64 * 128 / 16) + 2 * i, b + 2 * i);
      product_commit();
      product_wait<1>();
      if (before >= 0) release(s, before);
      before = slot;
    } else {
      release(s, slot);
    }
  }
  if constexpr (HALVES > 0) {
    product_wait<0>();
    pin(sum[0]);
    pin(sum[1]);
    release(s, before);
  }
}

// SwiGLU in units of the hidden rows' scale.
__device__ __forceinline__ float swiglu(float gate, float up, const Plan& plan) {
  gate = min(gate, plan.limit);
  up = min(max(up, -plan.limit), plan.limit);
  const float gated = gate * reciprocal_fast(fmaf(exp2_fast(gate * (plan.alpha * -1.4426950408889634f)), plan.hidden_scale, plan.hidden_scale));
  return up * gated + gated;
}

template <int N>
__device__ __forceinline__ void gate_up_tile(Shared& s, const Plan& plan, Place<STAGES>& stage, const Tile& tile, int turn) {
  const int warpgroup = uniform(threadIdx.x / 128) - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, c = lane % 4, row = tile.row + warpgroup * ROWS;
  float* scales = s.scales[turn % 2][warpgroup];
  float sum[2][N / 2];
  if (row >= plan.rows) {
    if (tile.is_empty) {
#pragma unroll
      for (int i = 0; i < N / 2; i++) sum[0][i] = sum[1][i] = 0.0f;
    } else {
      multiply<N, 0>(s, stage, sum, warpgroup, plan.blocks);
    }
    for (int n = thread; n < N; n += 128) scales[n] = 0.0f;
  } else {
    constexpr int EACH = (N + 127) / 128;
    const float weight_scale = __ldg(plan.weight_scales + (static_cast<size_t>(tile.expert) * ((plan.rows + ROWS - 1) / ROWS) + row / ROWS) * plan.blocks);
    float mine[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) mine[i] = __ldg(plan.scales + min(tile.token + thread + 128 * i, plan.buffer_rows - 1)) * weight_scale;
    multiply<N, 2>(s, stage, sum, warpgroup, plan.blocks);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (thread + 128 * i < N) scales[thread + 128 * i] = mine[i];
  }
  meet<128>(1 + warpgroup);
  const int column = row / 2 + 16 * warp + 4 * c;
  const bool has_ones = column >= plan.intermediate && column < plan.intermediate + plan.bias_columns;
  const float one = reciprocal_fast(plan.hidden_scale);
  const uint32_t ones = fp8x2_pack(one, one) * 0x10001u;
  unsigned char* out = static_cast<unsigned char*>(plan.out) + static_cast<size_t>(tile.token + g) * plan.out_columns + column;
  if (column >= plan.out_columns) return;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    const float2 scale = *reinterpret_cast<const float2*>(scales + 8 * j + 2 * c);
    uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 2; b++) {
      const float f = b == 0 ? scale.x : scale.y;
      word |= fp8x2_pack(swiglu(sum[0][4 * j + b] * f, sum[0][4 * j + 2 + b] * f, plan),
                         swiglu(sum[1][4 * j + b] * f, sum[1][4 * j + 2 + b] * f, plan)) << (16 * b);
    }
    word = transpose_8x8(word);
    if (has_ones) word = ones;
    if (8 * j + g < tile.count) *reinterpret_cast<uint32_t*>(out + static_cast<size_t>(8 * j) * plan.out_columns) = word;
  }
}

template <int N>
__device__ __forceinline__ void down_tile(Shared& s, const Plan& plan, Place<STAGES>& stage, const Tile& tile) {
  const int warpgroup = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int row = tile.row + warpgroup * ROWS;
  const size_t row_block = static_cast<size_t>(tile.expert) * ((plan.rows + ROWS - 1) / ROWS) + row / ROWS;
  const float scale = row < plan.rows ? __ldg(plan.weight_scales + row_block * plan.blocks) * plan.hidden_scale : 0.0f;
  float sum[2][N / 2];
  if (row + 64 < plan.rows) multiply<N, 2>(s, stage, sum, warpgroup, plan.blocks);
  else if (row < plan.rows) multiply<N, 1>(s, stage, sum, warpgroup, plan.blocks);
  else return multiply<N, 0>(s, stage, sum, warpgroup, plan.blocks);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int column = row + 64 * h + 16 * warp + 4 * c;
    uint16_t* out = static_cast<uint16_t*>(plan.out) + static_cast<size_t>(tile.token + g) * plan.out_columns + column;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const uint32_t x = transpose_8x8(bf16x2_pack(sum[h][4 * j] * scale, sum[h][4 * j + 1] * scale));
      const uint32_t y = transpose_8x8(bf16x2_pack(sum[h][4 * j + 2] * scale, sum[h][4 * j + 3] * scale));
      if (column < plan.out_columns && 8 * j + g < tile.count)
        *reinterpret_cast<uint2*>(out + static_cast<size_t>(8 * j) * plan.out_columns) = make_uint2(x, y);
    }
  }
}

template <bool IS_GATE_UP, int INDEX>
__device__ __forceinline__ void compute_tile(Shared& s, const Plan& plan, Place<STAGES>& stage, const Tile& tile, int turn) {
  if constexpr (INDEX < NUM_WIDTHS) {
    if (tile.width != INDEX) return compute_tile<IS_GATE_UP, INDEX + 1>(s, plan, stage, tile, turn);
    if constexpr (IS_GATE_UP) gate_up_tile<WIDTHS[INDEX]>(s, plan, stage, tile, turn);
    else down_tile<WIDTHS[INDEX]>(s, plan, stage, tile);
  }
}

template <bool IS_GATE_UP>
__device__ __forceinline__ void compute(Shared& s, const Plan& plan) {
  Place<STAGES> stage;
  Place<QUEUE> queued;
  for (;; queued.turn++) {
    wait_or_give_up(s, &s.tile_full[queued.slot()], queued.parity());
    const Tile tile = s.tiles[queued.slot()];
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.tile_empty[queued.slot()]);
    if (s.is_lost || tile.expert < 0) return;
    compute_tile<IS_GATE_UP, 0>(s, plan, stage, tile, queued.turn);
  }
}

template <class M, bool IS_GATE_UP>
__global__ void __launch_bounds__(THREADS, 1) experts_kernel(const __grid_constant__ Plan plan) {
  DYNAMIC_SHARED(memory);
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], CONSUMER_WARPS * CLUSTER);
    }
    for (int i = 0; i < QUEUE; i++) {
      barrier_init(&s.tile_full[i], 1);
      barrier_init(&s.tile_empty[i], CONSUMER_WARPS);
    }
    barrier_init(&s.number_full, 1);
    barrier_init(&s.number_empty, CLUSTER);
    barrier_init_fence();
    s.is_lost = 0;
  }
  list_work<M>(s, plan, (all_rows<IS_GATE_UP>(plan) + M::TILE_ROWS - 1) / M::TILE_ROWS);
  cluster_meet();
  if (threadIdx.x < 128) {
    leave_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x == 0) fetch<M, IS_GATE_UP>(s, plan);
    __syncwarp();
    cluster_meet();  // no block ends while another writes to it
  } else {
    take_registers<CONSUMER_REGISTERS>();
    compute<IS_GATE_UP>(s, plan);
    cluster_meet();
  }
}

template <class M, bool IS_GATE_UP>
int launch_experts(const Plan& plan, int multiprocessors, void* stream) {
  constexpr int shared_bytes = sizeof(Shared);
#ifdef TANDEM_EMULATE
  emulation::run(dim3(multiprocessors / CLUSTER * CLUSTER), THREADS, shared_bytes, [&] { experts_kernel<M, IS_GATE_UP>(plan); }, CLUSTER);
  return 0;
#else
  static_assert(shared_bytes <= 227 * 1024, "more shared memory than a block may have");
  const auto kernel = experts_kernel<M, IS_GATE_UP>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = CLUSTER;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(multiprocessors / CLUSTER * CLUSTER);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  static int clusters = 0;  // that run at the same time: a later one would begin when the work is done
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess && clusters == 0) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
  if (error != cudaSuccess) return static_cast<int>(error);
  config.gridDim = dim3(clusters * CLUSTER);
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, plan));
#endif
}

// Returns: 0, a CUDA error, or -1 where there is no instance for the shape.
template <bool IS_GATE_UP>
int start(Plan& plan, const void* q, const void* weights, int split_tokens, int multiprocessors, void* stream) {
  if (plan.experts > MAX_EXPERTS || plan.blocks < 1 || plan.buffer_rows > 8 * 32767) return -1;
  if (plan.buffer_rows == 0 || all_rows<IS_GATE_UP>(plan) == 0) return 0;
  // A rank without a piece of its experts has no weights to describe, but bias columns to fill.
  int error = plan.rows == 0 ? 0 : describe_rows(&plan.weights, weights, 128 * plan.blocks, plan.rows, plan.experts, ROWS);
  for (int i = 0; i < NUM_WIDTHS && error == 0; i++)
    error = describe_rows(&plan.tokens[i], q, 128 * plan.blocks, plan.buffer_rows, 1, WIDTHS[i]);
  if (error != 0) return error;
  if (split_tokens) return launch_experts<Mode<true>, IS_GATE_UP>(plan, multiprocessors, stream);
  return launch_experts<Mode<false>, IS_GATE_UP>(plan, multiprocessors, stream);
}

}  // namespace

extern "C" int experts_gate_up(const void* q, const float* scales, const int32_t* ends, const void* weights, const float* weight_scales,
                               void* out, int32_t* counters, int buffer_rows, int experts, int rows, int blocks, int out_columns,
                               int intermediate, int bias_columns, float alpha, float limit, float hidden_scale, int split_tokens, int multiprocessors,
                               void* stream) {
  Plan plan = {{}, {}, scales, weight_scales, ends, out, counters, experts, buffer_rows, rows, blocks, out_columns,
               intermediate, bias_columns, alpha, limit, hidden_scale};
  return start<true>(plan, q, weights, split_tokens, multiprocessors, stream);
}

extern "C" int experts_down(const void* q, const int32_t* ends, const void* weights, const float* weight_scales, void* out, int32_t* counters,
                            int buffer_rows, int experts, int rows, int blocks, float hidden_scale, int split_tokens, int multiprocessors,
                            void* stream) {
  Plan plan = {{}, {}, nullptr, weight_scales, ends, out, counters, experts, buffer_rows, rows, blocks, rows, 0, 0, 0.0f, 0.0f,
               hidden_scale};
  return start<false>(plan, q, weights, split_tokens, multiprocessors, stream);
}
