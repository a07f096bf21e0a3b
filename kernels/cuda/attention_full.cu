// Decode attention of full layers over paged KV: one query a sequence, up to eight query heads on one KV head, head_dim 64, any length.
// A sequence is cut into chunks that depend on its own length and on the rows of the step, never on the other sequences. Persistent blocks take
// (chunk, KV head) items from a counter, because multiprocessors do not get equal shares of the memory's bandwidth. One warp keeps a ring
// of KV blocks full across items, the key warps attend to one KV block each a round, the adding warps sum the key warps' states, and those
// that finish last sum a sequence's chunks.
#include "attention.cuh"

namespace {

constexpr int kMaxChunks = 32, kMaxBatch = 128;
constexpr int kKeyBytes = 2 * kBlockSize * kHeadDim;      // keys, or values, of one block and head
constexpr int kQueryBytes = 2 * kGroup * kHeadDim;
constexpr int kAdders = 4;  // adding warps: four of sixteen dimensions each
constexpr int kStates = 2;  // items on their way from the key warps to the adding warps
// With 8 to 128 sequences of 8,192 tokens one block an SM of eight key warps took 2 to 18% longer, three stages 3 to 7%, five 4 to 10%: more
// bytes on their way than the latency needs only make everything else wait.
constexpr int kKeyWarps = 4, kStages = 2, kResident = 2;
constexpr int kThreads = (kKeyWarps + kAdders + 1) * 32;

struct AttentionArgs {
  const uint16_t* q;           // [batch, kv_heads * group, 64]
  const uint16_t* kv_pool;     // [blocks, 2, kv_heads, 16, 64]
  const int32_t* block_table;  // [batch, table_stride]
  const int32_t* seq_lens;     // [batch], 0 for a padded row
  const float* sink;           // [kv_heads * group]
  uint16_t* out;               // [batch, kv_heads * group, 64]
  const int32_t* cu_chunks;    // [batch + 1]
  float4* partial_acc;         // [chunks * kv_heads, 4, 32]: by adding warp and lane
  float2* partial_stats;       // [chunks * kv_heads, 4, 8]: maximum (base 2), sum
  int32_t* arrived;            // [batch, kv_heads, 4], zero before and after
  int32_t* tickets;            // [2]: items handed out, blocks that are done; zero before and after
  int batch, kv_heads, group, table_stride, chunk_blocks;
  float sm_scale;
};

// One chunk of one sequence for one KV head.
struct Item {
  int b, head, seq_len, first, last, first_chunk, chunks;  // blocks [first, last); the sequence's chunks
};

// What the warps of a block look up again and again.
struct Plan {
  int cu_chunks[kMaxBatch + 1];
  int seq_lens[kMaxBatch];
};

// Up to one KV block for each key warp, in a slot of the ring.
struct Round {
  int item;           // -1 ends the stream
  int start, high;    // position of the first key; keys count below `high`
  int count;          // KV blocks
  int is_first, is_last;
};

struct Shared {
  unsigned char ring[kStages][kKeyWarps][2 * kKeyBytes];
  unsigned char query[kStages][kQueryBytes];
  float4 acc[kStates][kKeyWarps][4][32];   // by quarter of the dimensions and lane
  float2 stats[kStates][kKeyWarps][kGroup];
  uint64_t full[kStages], empty[kStages], done[kStates], free[kStates];
  Round rounds[kStages];
  int state_item[kStates];
  Plan plan;
};

__device__ __forceinline__ Item locate(const AttentionArgs& a, const Plan& plan, int item) {
  const int chunk = item / a.kv_heads;
  int b = 0;
#pragma unroll
  for (int step = kMaxBatch / 2; step > 0; step >>= 1)
    if (b + step < a.batch && plan.cu_chunks[b + step] <= chunk) b += step;
  const int seq_len = plan.seq_lens[b], blocks = (seq_len + kBlockSize - 1) / kBlockSize;
  const int most = a.chunk_blocks * kMaxChunks, each = a.chunk_blocks * ((blocks + most - 1) / most);
  const int first = (chunk - plan.cu_chunks[b]) * each;
  return {b, item % a.kv_heads, seq_len, first, min(first + each, blocks), plan.cu_chunks[b], plan.cu_chunks[b + 1] - plan.cu_chunks[b]};
}

// This lane's id out of the 32 blocks from `first`.
__device__ __forceinline__ int look_up(const AttentionArgs& a, const Item& item, int first) {
  const int at = first + static_cast<int>(threadIdx.x % 32);
  return at < item.last ? __ldg(a.block_table + static_cast<size_t>(item.b) * a.table_stride + at) : 0;
}

__device__ __forceinline__ const uint16_t* keys_of(const AttentionArgs& a, int block, int head, int value) {
  return a.kv_pool + ((static_cast<size_t>(block) * 2 + value) * a.kv_heads + head) * kBlockSize * kHeadDim;
}

// The 16-byte piece of a row of keys or values, turned by the row against bank conflicts.
__device__ __forceinline__ int piece_at(int row, int piece) { return row * 128 + (piece ^ (row & 7)) * 16; }

// The copying warp: fills the ring round by round over all items of this block.
__device__ __forceinline__ void copy_rounds(const AttentionArgs& a, Shared& s, int items) {
  const int lane = threadIdx.x % 32;
  int at = blockIdx.x, slot = 0, parity = 1;
  Item item = {};
  int ids = 0, later_ids = 0;  // of these and the next 32 blocks
  if (at < items) {  // all but the newest block was there long before the kernel ahead
    item = locate(a, s.plan, at);
    ids = look_up(a, item, item.first);
    later_ids = look_up(a, item, item.first + 32);
    if (item.first + lane < item.last) {
      prefetch_bulk(keys_of(a, ids, item.head, 0), kKeyBytes);
      prefetch_bulk(keys_of(a, ids, item.head, 1), kKeyBytes);
    }
  }
  wait_for_previous_kernel();
  start_next_kernel();
  int ticket = 0;
  if (lane == 0 && at < items) ticket = atomicAdd(a.tickets, 1);
  auto next_round = [&] {
    if (++slot == kStages) slot = 0, parity ^= 1;
  };
  while (at < items) {
    const int next_at = gridDim.x + __shfl_sync(0xFFFFFFFFu, ticket, 0);
    Item next = {};
    int next_ids = 0, next_later_ids = 0;
    if (next_at < items) {
      next = locate(a, s.plan, next_at);
      next_ids = look_up(a, next, next.first);
      next_later_ids = look_up(a, next, next.first + 32);
      if (lane == 0) ticket = atomicAdd(a.tickets, 1);
    }
    for (int first = item.first; first < item.last; first += kKeyWarps) {
      const int in_table = (first - item.first) % 32, count = min(kKeyWarps, item.last - first);
      if (in_table == 0 && first > item.first) {
        ids = later_ids;
        later_ids = look_up(a, item, first + 32);
      }
      const bool is_first = first == item.first;
      barrier_wait(s.empty + slot, parity);
      if (lane == 0) s.rounds[slot] = {at, first * kBlockSize, item.seq_len, count, is_first, first + kKeyWarps >= item.last};
#pragma unroll
      for (int w = 0; w < kKeyWarps; w++) {
        if (w >= count) break;
        const int block = __shfl_sync(0xFFFFFFFFu, ids, in_table + w);
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int row = i % 4 * 4 + lane / 8;
          copy_async_16(s.ring[slot][w] + i / 4 * kKeyBytes + piece_at(row, lane % 8),
                        keys_of(a, block, item.head, i / 4) + row * kHeadDim + lane % 8 * 8);
        }
      }
      if (is_first) {
        const uint16_t* query = a.q + (static_cast<size_t>(item.b) * a.kv_heads + item.head) * a.group * kHeadDim;
        for (int i = lane; i < a.group * 8; i += 32) copy_async_16(s.query[slot] + i * 16, query + i * 8);
      }
      copy_async_arrive(s.full + slot);
      __syncwarp();
      if (lane == 0) barrier_arrive(s.full + slot);
      next_round();
    }
    at = next_at, item = next, ids = next_ids, later_ids = next_later_ids;
  }
  barrier_wait(s.empty + slot, parity);
  if (lane == 0) s.rounds[slot] = {-1, 0, 0, 0, 0, 1};
  copy_async_arrive(s.full + slot);
  __syncwarp();
  if (lane == 0) {
    barrier_arrive(s.full + slot);
    __threadfence();
    if (atomicAdd(a.tickets + 1, 1) == static_cast<int>(gridDim.x) - 1) a.tickets[0] = a.tickets[1] = 0;
  }
}

// A key warp: one KV block of every round.
__device__ __forceinline__ void attend_rounds(const AttentionArgs& a, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const float scale = a.sm_scale * kLog2e;
  State s = {};
  s.top = -INFINITY;
  uint4 q[2] = {};
  int slot = 0, parity = 0, stored = 0;
  while (true) {
    barrier_wait(shared.full + slot, parity);
    const Round round = shared.rounds[slot];
    if (round.is_first) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        if (g < a.group) q[half] = *reinterpret_cast<const uint4*>(shared.query[slot] + g * 128 + (2 * c + half) * 16);
      s = {};
      s.top = -INFINITY;
    }
    Keys keys;
    const bool is_mine = warp < round.count;
    if (is_mine) {
      const unsigned char* k = shared.ring[slot][warp];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        keys.k[i / 2][i % 2] = *reinterpret_cast<const uint4*>(k + piece_at(i / 2 * 8 + g, 2 * c + i % 2));
        keys.v[i] = *reinterpret_cast<const uint4*>(k + kKeyBytes + piece_at(i / 2 * 8 + 2 * c + i % 2, g));
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty + slot);
    if (++slot == kStages) slot = 0, parity ^= 1;
    if (is_mine) attend(s, keys, q, round.start + warp * kBlockSize, 0, round.high, scale, c);
    if (!round.is_last) continue;
    const int to = stored % kStates;
    barrier_wait(shared.free + to, (stored / kStates & 1) ^ 1);
    stored++;
    float sum = s.sum;
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (c == 0) shared.stats[to][warp][g] = make_float2(s.top, sum);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = i % 2 * 4, half = i / 2;  // dimensions 16 c + 8 half + at .. + 3
      shared.acc[to][warp][i][lane] = make_float4(s.acc[at][half], s.acc[at + 1][half], s.acc[at + 2][half], s.acc[at + 3][half]);
    }
    if (threadIdx.x == 0) shared.state_item[to] = round.item;
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.done + to);
    if (round.item < 0) return;
  }
}

__device__ __forceinline__ void add_state(float4& value, float& sum, float top, const float2& stats, const float4& part) {
  const float weight = exp2f(stats.x - top);
  sum += stats.y * weight;
  value.x += part.x * weight, value.y += part.y * weight, value.z += part.z * weight, value.w += part.w * weight;
}

__device__ __forceinline__ void finish(const AttentionArgs& a, const Item& item, int h, int d, const float4& value, float top, float sum) {
  if (h >= a.group) return;
  const float sink = __ldg(a.sink + item.head * a.group + h) * kLog2e;
  const float all = fmaxf(top, sink), shrink = exp2f(top - all);
  const float factor = shrink / (sum * shrink + exp2f(sink - all));
  uint16_t* to = a.out + ((static_cast<size_t>(item.b) * a.kv_heads + item.head) * a.group + h) * kHeadDim + d;
  *reinterpret_cast<uint2*>(to) = make_uint2(bf16x2_pack(value.x * factor, value.y * factor), bf16x2_pack(value.z * factor, value.w * factor));
}

// An adding warp: sums the key warps' states of every item, and after a sequence's last chunk its chunks, in their order.
__device__ __forceinline__ void add_states(const AttentionArgs& a, Shared& shared) {
  const int lane = threadIdx.x % 32, adder = threadIdx.x / 32 - kKeyWarps, h = lane / 4, d = lane % 4 * 16 + adder * 4;
  for (int turn = 0;; turn++) {
    const int slot = turn % kStates;
    barrier_wait(shared.done + slot, turn / kStates & 1);
    const int at = shared.state_item[slot];
    if (at < 0) return;
    const Item item = locate(a, shared.plan, at);
    float top = -1e30f, sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kKeyWarps; w++) top = fmaxf(top, shared.stats[slot][w][h].x);
#pragma unroll
    for (int w = 0; w < kKeyWarps; w++) add_state(value, sum, top, shared.stats[slot][w][h], shared.acc[slot][w][adder][lane]);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.free + slot);
    if (item.chunks == 1) {
      finish(a, item, h, d, value, top, sum);
      continue;
    }
    const size_t here = static_cast<size_t>(at) * kAdders + adder;
    a.partial_acc[here * 32 + lane] = value;
    if (lane % 4 == 0) a.partial_stats[here * kGroup + h] = make_float2(top, sum);
    __threadfence();
    __syncwarp();
    int before = 0;
    int32_t* counter = a.arrived + (item.b * a.kv_heads + item.head) * kAdders + adder;
    if (lane == 0) before = atomicAdd(counter, 1);
    if (__shfl_sync(0xFFFFFFFFu, before, 0) != item.chunks - 1) continue;
    if (lane == 0) *counter = 0;
    __threadfence();
    const size_t first = (static_cast<size_t>(item.first_chunk) * a.kv_heads + item.head) * kAdders + adder;
    const int stride = a.kv_heads * kAdders;
    top = -1e30f, sum = 0.0f;
    value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < item.chunks; i++) top = fmaxf(top, __ldcg(&a.partial_stats[(first + i * stride) * kGroup + h].x));
#pragma unroll 8
    for (int i = 0; i < item.chunks; i++) {
      const float2* stats = a.partial_stats + (first + i * stride) * kGroup + h;
      const uint4 part = load_global_16(a.partial_acc + (first + i * stride) * 32 + lane);
      add_state(value, sum, top, make_float2(__ldcg(&stats->x), __ldcg(&stats->y)),
                make_float4(__uint_as_float(part.x), __uint_as_float(part.y), __uint_as_float(part.z), __uint_as_float(part.w)));
    }
    finish(a, item, h, d, value, top, sum);
  }
}

__global__ void __launch_bounds__(kThreads, kResident) attention_full(const __grid_constant__ AttentionArgs a) {
  DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<Shared*>(bytes);
  for (int i = threadIdx.x; i < kStages; i += blockDim.x) {
    barrier_init(shared.full + i, 33);
    barrier_init(shared.empty + i, kKeyWarps);
  }
  if (threadIdx.x < kStates) {
    barrier_init(shared.done + threadIdx.x, kKeyWarps);
    barrier_init(shared.free + threadIdx.x, kAdders);
  }
  barrier_init_fence();
  // Lengths and tables are older than the kernel ahead: only queries and the newest keys are not.
  for (int i = threadIdx.x; i <= a.batch; i += blockDim.x) shared.plan.cu_chunks[i] = __ldcg(a.cu_chunks + i);
  for (int i = threadIdx.x; i < a.batch; i += blockDim.x) shared.plan.seq_lens[i] = __ldcg(a.seq_lens + i);
  __syncthreads();
  const int items = shared.plan.cu_chunks[a.batch] * a.kv_heads, warp = threadIdx.x / 32;
  if (warp < kKeyWarps) {
    attend_rounds(a, shared);
  } else if (warp < kKeyWarps + kAdders) {
    const int row = a.kv_heads * a.group * kHeadDim;
    for (int b = blockIdx.x; b < a.batch; b += gridDim.x)  // padded rows: finite, so that no NaN spreads
      if (shared.plan.seq_lens[b] == 0)
        for (int i = threadIdx.x - kKeyWarps * 32; i < row; i += kAdders * 32) a.out[static_cast<size_t>(b) * row + i] = 0;
    add_states(a, shared);
  } else {
    copy_rounds(a, shared, items);
  }
}

}  // namespace

// cu_chunks comes from tandem_prepare_step, which cuts with the same rule. partial_*: one entry a chunk and KV head.
extern "C" int tandem_attention_full(const void* q, const void* kv_pool, const void* block_table, const void* seq_lens, const void* sink,
                                     void* out, const void* cu_chunks, void* partial_acc, void* partial_stats, void* arrived, void* tickets,
                                     int batch, int kv_heads, int group, int table_stride, int chunk_blocks, float sm_scale, int processors,
                                     void* stream) {
  static_assert((sizeof(Shared) + 1024) * kResident <= 227 * 1024, "more shared memory than a multiprocessor has");
  if (group > kGroup || batch > kMaxBatch) return -1;
  const AttentionArgs a = {static_cast<const uint16_t*>(q), static_cast<const uint16_t*>(kv_pool), static_cast<const int32_t*>(block_table),
                           static_cast<const int32_t*>(seq_lens), static_cast<const float*>(sink), static_cast<uint16_t*>(out),
                           static_cast<const int32_t*>(cu_chunks), static_cast<float4*>(partial_acc), static_cast<float2*>(partial_stats),
                           static_cast<int32_t*>(arrived), static_cast<int32_t*>(tickets), batch, kv_heads, group, table_stride, chunk_blocks, sm_scale};
  return launch(attention_full, dim3(kResident * processors), kThreads, sizeof(Shared), stream, a);
}
