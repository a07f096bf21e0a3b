// Copies KV between two paged pools of different head layouts and digests it on the way: one pass over the source, for any number of
// layers in one launch. The target may be another GPU's memory. Without a target it only digests.
//
// A pool of one layer is [blocks, 2 (K, V), heads, block_size, row]; a tile is one head of K or of V of one block, contiguous on both
// sides. A stage holds some tiles one after the other; bulk copies bring it to shared memory and take it from there to the target, so that
// a few multiprocessors keep a link busy. Warps beside them digest what lies in shared memory. The digest is that of kernels/digest.py.
//
//   loader: waits until a stage is free, tells what its tiles are, starts the copies in   -> full
//   storer: full -> starts the copies out; a stage that they have read is free            -> empty   (not without a target)
//   digesters, in two teams that take turns: full -> sum                                  -> empty
#include <atomic>

#include "primitives.cuh"

constexpr int MAX_SEGMENTS = 64;

struct Segment {
  const unsigned char* source;  // of the first head's K in block 0
  unsigned char* target;        // likewise; null: digest only
  const int32_t* source_ids;    // block of each logical block from first_logical on; null: 0, 1, 2, ...
  const int32_t* target_ids;    // likewise
  const uint64_t* heads;        // multipliers of K of the first head; V's are model_heads further
  int32_t start, end;           // tokens of the sequence
  int32_t first_logical;
  int32_t first_tile;           // tiles of all segments before
};

struct Plan {
  Segment segments[MAX_SEGMENTS];
  const uint64_t* words;         // [row words]
  const uint64_t* positions;     // [tokens, 2]
  unsigned long long* digest;    // [sum, thread blocks of this launch that are done]
  unsigned long long* seen;      // on the host: the sum once all are done
  int64_t source_kv_bytes, target_kv_bytes;  // from K to V of a block; a block is twice that
  int32_t num_segments, num_tiles, num_heads, block_size, row_bytes, model_heads;
  int32_t stage_tiles;           // at most MAX_STAGE_TILES and STAGE_BYTES
  int32_t run_tiles;             // divides stage_tiles and num_heads: neighbours that are contiguous on both sides
};

namespace {
constexpr int STAGES = 12, STAGE_BYTES = 16384, MAX_STAGE_TILES = 16;
constexpr int TEAMS = 2, TEAM_WARPS = 4;
constexpr int LOADER = TEAMS * TEAM_WARPS, STORER = LOADER + 1, THREADS = 32 * (STORER + 1);
constexpr int STORES_AHEAD = 3;  // stages that the copies out may still be reading

struct Tile {
  unsigned char* target;
  uint64_t multiplier;
  int32_t origin;  // position of its first row
  int32_t begin, end;  // its rows that are meant
  int32_t offset, bytes;  // within the stage, of the copy that starts with this tile; 0 if an earlier one has it
};

struct Shared {
  unsigned char stages[STAGES][STAGE_BYTES];
  Tile tiles[STAGES][MAX_STAGE_TILES];
  uint64_t full[STAGES], empty[STAGES];
};

// This block's part of all stages: neighbours, so that block ids are mostly in L1.
struct Share {
  int first, count;
  __device__ Share(const Plan& plan) {
    const int64_t stages = (plan.num_tiles + plan.stage_tiles - 1) / plan.stage_tiles;
    first = static_cast<int>(stages * blockIdx.x / gridDim.x);
    count = static_cast<int>(stages * (blockIdx.x + 1) / gridDim.x) - first;
  }
};

// word, signed, times the multiplier whose halves these are: the low one taken as signed, which the high one makes up for.
struct Multiplier {
  int32_t low;
  uint32_t high;
  __device__ Multiplier(uint64_t x = 0) : low(static_cast<int32_t>(x)), high(static_cast<uint32_t>(x >> 32) + (static_cast<uint32_t>(x) >> 31)) {}
};
struct Sum {
  uint64_t wide = 0;
  uint32_t high = 0;
  __device__ __forceinline__ void add(uint32_t word, const Multiplier& by) {
    wide += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(word)) * by.low);
    high += word * by.high;
  }
  __device__ __forceinline__ uint64_t value() const { return wide + (static_cast<uint64_t>(high) << 32); }
};

__device__ __forceinline__ uint64_t times(uint32_t word, uint64_t multiplier) {
  return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(word))) * multiplier;
}

__device__ bool writes(const Plan& plan) { return plan.segments[0].target != nullptr; }

__device__ void load(const Plan& plan, Shared& shared, int lane) {
  const Share share(plan);
  const bool has_target = writes(plan);
  const int64_t tile_bytes = static_cast<int64_t>(plan.block_size) * plan.row_bytes;
  int s = 0;
  for (int j = 0; j < share.count; j++) {
    const int slot = j % STAGES, number = (share.first + j) * plan.stage_tiles + lane;
    const unsigned char* source = nullptr;
    Tile tile = {nullptr, 0, 0, 0, 0, 0, 0};
    const bool is_there = lane < plan.stage_tiles && number < plan.num_tiles;
    if (is_there) {
      while (s + 1 < plan.num_segments && number >= plan.segments[s + 1].first_tile) s++;
      const Segment& segment = plan.segments[s];
      const int index = number - segment.first_tile;
      const int head = index % plan.num_heads, kv = index / plan.num_heads % 2, block = index / plan.num_heads / 2;
      const int64_t source_block = segment.source_ids ? segment.source_ids[block] : block;
      const int64_t target_block = has_target && segment.target_ids ? segment.target_ids[block] : block;
      tile.multiplier = segment.heads[kv * plan.model_heads + head];
      tile.origin = (segment.first_logical + block) * plan.block_size;
      tile.begin = max(segment.start - tile.origin, 0);
      tile.end = min(segment.end - tile.origin, plan.block_size);
      const int skipped = tile.begin * plan.row_bytes;
      tile.offset = static_cast<int32_t>(lane * tile_bytes) + skipped;
      source = segment.source + (source_block * 2 + kv) * plan.source_kv_bytes + head * tile_bytes + skipped;
      if (has_target) tile.target = segment.target + (target_block * 2 + kv) * plan.target_kv_bytes + head * tile_bytes + skipped;
      if (tile.begin > 0 || tile.end < plan.block_size)
        tile.bytes = max(tile.end - tile.begin, 0) * plan.row_bytes;
      else if (lane % plan.run_tiles == 0)
        tile.bytes = static_cast<int32_t>(plan.run_tiles * tile_bytes);
    }
    barrier_wait(&shared.empty[slot], (j / STAGES & 1) ^ 1);
    if (lane < plan.stage_tiles) {
      shared.tiles[slot][lane] = tile;
      if (tile.bytes > 0)
        copy_bulk(shared.stages[slot] + tile.offset, source, tile.bytes, &shared.full[slot]);
      else
        barrier_arrive(&shared.full[slot]);
    }
    __syncwarp();
  }
}

__device__ void store(const Plan& plan, Shared& shared, int lane) {
  const Share share(plan);
  for (int j = 0; j < share.count; j++) {
    const int slot = j % STAGES;
    barrier_wait(&shared.full[slot], j / STAGES & 1);
    if (lane < plan.stage_tiles) {
      const Tile& tile = shared.tiles[slot][lane];
      if (tile.bytes > 0) store_bulk(tile.target, shared.stages[slot] + tile.offset, tile.bytes);
    }
    store_bulk_commit();
    if (j < STORES_AHEAD) continue;
    store_bulk_wait_read<STORES_AHEAD>();
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[(j - STORES_AHEAD) % STAGES]);
  }
  store_bulk_wait<0>();
  __threadfence_system();  // what lies in another GPU is there before anybody learns that this has ended
}

// Sums over the 2 * HALF lanes of a row, for as many rows a lane: each lane ends with one whole sum, that of its own number, in sums[0].
template <int HALF, int LANES>
__device__ __forceinline__ void row_sums(uint64_t (&sums)[LANES], int lane) {
  const bool is_upper = lane & HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const uint64_t theirs = is_upper ? sums[i] : sums[i + HALF], mine = is_upper ? sums[i + HALF] : sums[i];
    sums[i] = mine + __shfl_xor_sync(0xFFFFFFFFu, theirs, HALF);
  }
  if constexpr (HALF > 1) row_sums<HALF / 2>(sums, lane);
}

// LANES: of a row, 16 bytes each. Returns this lane's part of the digest.
template <int LANES>
__device__ uint64_t digest(const Plan& plan, Shared& shared, int team, int warp, int lane) {
  constexpr int ROWS = 32 / LANES;  // that a warp reads at once; LANES times that in one go
  const Share share(plan);
  const int rows = plan.stage_tiles * plan.block_size;
  Multiplier words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = Multiplier(plan.words[lane % LANES * 4 + i]);
  uint64_t total = 0;
  for (int j = team; j < share.count; j += TEAMS) {
    const int slot = j % STAGES;
    barrier_wait(&shared.full[slot], j / STAGES & 1);
    for (int first = warp * 32; first < rows; first += TEAM_WARPS * 32) {
      const int row = first + lane % LANES * ROWS + lane / LANES;  // whose sum this lane will have
      const int number = min(row / plan.block_size, plan.stage_tiles - 1), offset = row - number * plan.block_size;
      const Tile& tile = shared.tiles[slot][number];
      const bool is_meant = offset >= tile.begin && offset < tile.end;
      const uint64_t* spread = plan.positions + 2 * static_cast<int64_t>(is_meant ? tile.origin + offset : 0);
      const uint64_t low = __ldg(spread), high = __ldg(spread + 1), multiplier = is_meant ? tile.multiplier : 0;
      const unsigned char* place = shared.stages[slot] + first * (LANES * 16) + lane * 16;
      uint64_t sums[LANES];
#pragma unroll
      for (int i = 0; i < LANES; i++) {
        const bool is_inside = first + i * ROWS + lane / LANES < rows;
        const uint4 data = is_inside ? *reinterpret_cast<const uint4*>(place + i * 512) : make_uint4(0, 0, 0, 0);
        Sum sum;
        sum.add(data.x, words[0]);
        sum.add(data.y, words[1]);
        sum.add(data.z, words[2]);
        sum.add(data.w, words[3]);
        sums[i] = sum.value();
      }
      if constexpr (LANES > 1) row_sums<LANES / 2>(sums, lane);
      const uint64_t whole = sums[0];
      total += multiplier * (times(static_cast<uint32_t>(whole), low) + times(static_cast<uint32_t>(whole >> 32), high));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(&shared.empty[slot]);
  }
  return total;
}

template <int LANES>
__global__ void __launch_bounds__(THREADS, 1) copy_kernel(const __grid_constant__ Plan plan) {
  DYNAMIC_SHARED(memory);
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(&shared.full[i], plan.stage_tiles);
      barrier_init(&shared.empty[i], TEAM_WARPS + (writes(plan) ? 1 : 0));
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp == LOADER) {
    load(plan, shared, lane);
  } else if (warp == STORER) {
    if (writes(plan)) store(plan, shared, lane);
  } else {
    uint64_t total = digest<LANES>(plan, shared, warp / TEAM_WARPS, warp % TEAM_WARPS, lane);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
    if (lane == 0) atomicAdd(plan.digest, static_cast<unsigned long long>(total));
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x > 0 || atomicAdd(plan.digest + 1, 1ull) + 1 < gridDim.x) return;
  __threadfence();
  plan.digest[1] = 0;  // for the next launch
  *plan.seen = atomicAdd(plan.digest, 0ull);
}

template <int LANES>
int start(const Plan& plan, int blocks, void* stream) {
  const int stages = (plan.num_tiles + plan.stage_tiles - 1) / plan.stage_tiles, shared_bytes = sizeof(Shared);
  const dim3 grid(min(blocks, max(stages, 1)));
#ifdef TANDEM_EMULATE
  emulation::run(grid, THREADS, shared_bytes, [&] { copy_kernel<LANES>(plan); });
  return 0;
#else
  static std::atomic<uint64_t> prepared{0};  // devices, one bit each
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && !(prepared.load() >> device & 1)) {
    error = cudaFuncSetAttribute(copy_kernel<LANES>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error == cudaSuccess) prepared |= uint64_t{1} << device;
  }
  if (error != cudaSuccess) return static_cast<int>(error);
  copy_kernel<LANES><<<grid, THREADS, shared_bytes, static_cast<cudaStream_t>(stream)>>>(plan);
  return static_cast<int>(cudaGetLastError());
#endif
}

}  // namespace

// `blocks`: thread blocks, one a multiprocessor: what the copy may take from whatever else runs.
extern "C" int kv_copy(const Plan* plan, int blocks, void* stream) {
  switch (plan->row_bytes) {
    case 16: return start<1>(*plan, blocks, stream);
    case 32: return start<2>(*plan, blocks, stream);
    case 64: return start<4>(*plan, blocks, stream);
    case 128: return start<8>(*plan, blocks, stream);
    case 256: return start<16>(*plan, blocks, stream);
    case 512: return start<32>(*plan, blocks, stream);
  }
  return -1;
}
