// Copies KV between two paged pools of different head layouts and digests it on the way: one pass over the source, for any number of
// layers in one launch. The target may be another GPU's memory. Without a target it only digests.
//
// A pool of one layer is [blocks, 2 (K, V), heads, block_size, row]; a tile is one head of K or of V of one block, contiguous on both
// sides. One warp moves one tile at a time, 16 bytes per lane and access. The digest is that of kernels/digest.py.
#include "primitives.cuh"

constexpr int MAX_SEGMENTS = 32;

struct Segment {
  const unsigned char* source;  // of the first head's K in block 0
  unsigned char* target;        // likewise; null: digest only
  const int32_t* source_ids;    // block of each logical block from first_logical on; null: 0, 1, 2, ...
  const int32_t* target_ids;
  const uint64_t* heads;        // multipliers of K of the first head; V's are model_heads further
  int32_t start, end;           // tokens of the sequence
  int32_t first_logical;
  int32_t first_tile;           // tiles of all segments before
};

struct Plan {
  Segment segments[MAX_SEGMENTS];
  const uint64_t* words;      // [row words]
  const uint64_t* positions;  // [tokens, 2]
  unsigned long long* digest;
  int64_t source_kv_bytes, target_kv_bytes;  // from K to V of a block; a block is twice that
  int32_t num_segments, num_tiles, num_heads, block_size, row_bytes, model_heads;
};

namespace {
constexpr int THREADS = 512;
constexpr int AHEAD = 4;  // vectors that a lane has in flight

// Lanes of one row, neighbours, add up; all of them get the sum.
__device__ __forceinline__ uint64_t row_sum(uint64_t x, int lanes) {
  for (int step = lanes / 2; step > 0; step >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}

__device__ __forceinline__ uint64_t times(uint32_t word, uint64_t multiplier) {
  return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(word))) * multiplier;
}

template <bool WRITE>
__global__ void __launch_bounds__(THREADS, 1) copy_kernel(const __grid_constant__ Plan plan) {
  const int lane = threadIdx.x % 32, warps = gridDim.x * (THREADS / 32);
  const int row_lanes = plan.row_bytes / 16, row_words = plan.row_bytes / 4;
  const int rows_at_once = 32 / row_lanes, lane_row = lane / row_lanes;
  const int64_t tile_bytes = static_cast<int64_t>(plan.block_size) * plan.row_bytes;
  uint64_t words[4];
  for (int i = 0; i < 4; i++) words[i] = plan.words[(lane * 4) % row_words + i];
  uint64_t total = 0;
  int s = 0;
  for (int tile = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; tile < plan.num_tiles; tile += warps) {
    while (s + 1 < plan.num_segments && tile >= plan.segments[s + 1].first_tile) s++;
    const Segment& segment = plan.segments[s];
    const int index = tile - segment.first_tile;
    const int head = index % plan.num_heads, kv = index / plan.num_heads % 2, block = index / plan.num_heads / 2;
    const int64_t source_block = segment.source_ids ? segment.source_ids[block] : block;
    const unsigned char* source = segment.source + (source_block * 2 + kv) * plan.source_kv_bytes + head * tile_bytes;
    unsigned char* target = nullptr;
    if (WRITE) target = segment.target + (static_cast<int64_t>(segment.target_ids[block]) * 2 + kv) * plan.target_kv_bytes + head * tile_bytes;
    const int origin = (segment.first_logical + block) * plan.block_size;
    uint64_t sum = 0;
    for (int first = 0; first < plan.block_size; first += rows_at_once * AHEAD) {
      uint4 data[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int row = first + i * rows_at_once + lane_row, position = origin + row;
        const bool is_meant = row < plan.block_size && position >= segment.start && position < segment.end;
        data[i] = is_meant ? load_stream_16(source + (first + i * rows_at_once) * plan.row_bytes + lane * 16) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        const int row = first + i * rows_at_once + lane_row, position = origin + row;
        const bool is_meant = row < plan.block_size && position >= segment.start && position < segment.end;
        if (WRITE && is_meant) *reinterpret_cast<uint4*>(target + (first + i * rows_at_once) * plan.row_bytes + lane * 16) = data[i];
        const uint64_t part = times(data[i].x, words[0]) + times(data[i].y, words[1]) + times(data[i].z, words[2]) + times(data[i].w, words[3]);
        const uint64_t words_sum = row_sum(part, row_lanes);
        if (is_meant && lane % row_lanes == 0) {
          const uint64_t* spread = plan.positions + 2 * static_cast<int64_t>(position);
          sum += times(static_cast<uint32_t>(words_sum), spread[0]) + times(static_cast<uint32_t>(words_sum >> 32), spread[1]);
        }
      }
    }
    total += sum * segment.heads[kv * plan.model_heads + head];
  }
  total = row_sum(total, 32);
  if (lane == 0) atomicAdd(plan.digest, static_cast<unsigned long long>(total));
  if (WRITE) __threadfence_system();  // what lies in another GPU is there before anybody learns that this has ended
}
}  // namespace

// `blocks`: thread blocks, that is how many multiprocessors the copy may take from whatever else runs.
extern "C" int kv_copy(const Plan* plan, int blocks, void* stream) {
  const bool writes = plan->segments[0].target != nullptr;
#ifdef TANDEM_EMULATE
  emulation::run(dim3(blocks), THREADS, 0, [&] { writes ? copy_kernel<true>(*plan) : copy_kernel<false>(*plan); });
  return 0;
#else
  if (writes)
    copy_kernel<true><<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*plan);
  else
    copy_kernel<false><<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*plan);
  return static_cast<int>(cudaGetLastError());
#endif
}
