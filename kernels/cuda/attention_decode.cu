// One decode step of paged attention with a sink: one query a sequence, up to eight query heads on one KV head, head_dim 64. A warp takes
// whole KV blocks of 16 keys straight from memory to registers; warps merge in shared memory. Full layers are cut into chunks that depend
// on the sequence's own length alone, so that a result does not depend on the batch; the block that finishes last adds a sequence's chunks.
#include "primitives.cuh"

namespace {

constexpr int kBlockSize = 16, kHeadDim = 64, kGroup = 8;
constexpr int kChunkBlocks = 32, kMaxChunks = 64, kMaxBatch = 128;
constexpr float kLog2e = 1.4426950408889634f;

struct AttentionArgs {
  const uint16_t* q;           // [batch, kv_heads * group, 64]
  const uint16_t* kv_pool;     // [blocks, 2, kv_heads, 16, 64]
  const int32_t* block_table;  // [batch, table_stride]
  const int32_t* kv_start;     // [batch] or null for zeros
  const int32_t* seq_lens;     // [batch], 0 for a padded row
  const float* sink;           // [kv_heads * group]
  uint16_t* out;               // [batch, kv_heads * group, 64]
  const int32_t* cu_chunks;    // [batch + 1]
  float* partial_acc;          // [chunks * kv_heads, 8, 64]
  float* partial_stats;        // [chunks * kv_heads, 8, 2]: maximum (base 2), sum
  int32_t* arrived;            // [batch, kv_heads, 4], zero before and after
  int batch, kv_heads, group, table_stride, window;
  float sm_scale;
};

struct Keys { uint4 k[2][2], v[4]; };  // one KV block: keys g, g + 8 for the scores; keys 2c, 2c + 1, 2c + 8, 2c + 9 for the values

struct State {
  float acc[8][4];   // [i][0..1]: head g, dimensions 16 c + i and 16 c + 8 + i; [2..3] rows that the group does not fill
  float top, sum;    // running maximum (base 2) and sum of head g
};

__device__ __forceinline__ void load_keys(Keys& s, const AttentionArgs& a, int block, int head, int g, int c) {
  const uint16_t* k = a.kv_pool + (static_cast<size_t>(block) * 2 * a.kv_heads + head) * kBlockSize * kHeadDim;
  const uint16_t* v = k + static_cast<size_t>(a.kv_heads) * kBlockSize * kHeadDim;
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) s.k[t][half] = load_stream_16(k + (t * 8 + g) * kHeadDim + half * 32 + 8 * c);
#pragma unroll
  for (int r = 0; r < 4; r++) s.v[r] = load_stream_16(v + (r / 2 * 8 + 2 * c + r % 2) * kHeadDim + 8 * g);
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Adds one block of keys at positions `start` .. `start` + 15, of which low <= position < high count.
__device__ __forceinline__ void attend(State& s, Keys& keys, const uint4 (&q)[2], int start, int low, int high, float scale, int c) {
  float score[2][4] = {};
#pragma unroll
  for (int t = 0; t < 2; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      mma_bf16(score[t], q[half].x, 0u, q[half].y, 0u, keys.k[t][half].x, keys.k[t][half].y);
      mma_bf16(score[t], q[half].z, 0u, q[half].w, 0u, keys.k[t][half].z, keys.k[t][half].w);
    }
  float x[4];
#pragma unroll
  for (int r = 0; r < 4; r++) x[r] = score[r / 2][r % 2] * scale;
  if (start < low || start + kBlockSize > high) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int position = start + r / 2 * 8 + 2 * c + r % 2;
      if (position < low || position >= high) {
        x[r] = -INFINITY;
        keys.v[r] = make_uint4(0, 0, 0, 0);  // unwritten slots may hold NaN
      }
    }
  }
  float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
  top = fmaxf(top, s.top);
  const float shrink = exp2f(s.top - top);
  s.top = top;
  float p[4];
#pragma unroll
  for (int r = 0; r < 4; r++) p[r] = exp2f(x[r] - top);
  s.sum = s.sum * shrink + (p[0] + p[1]) + (p[2] + p[3]);
  const uint32_t p0 = bf16x2_pack(p[0], p[1]), p1 = bf16x2_pack(p[2], p[3]);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    s.acc[i][0] *= shrink;
    s.acc[i][1] *= shrink;
    const uint32_t pick = i % 2 ? 0x7632u : 0x5410u;
    mma_bf16(s.acc[i], p0, 0u, p1, 0u, __byte_perm(word(keys.v[0], i / 2), word(keys.v[1], i / 2), pick),
             __byte_perm(word(keys.v[2], i / 2), word(keys.v[3], i / 2), pick));
  }
}

// All KV blocks [first, last) of one sequence and KV head, shared out over the warps. `table` is the sequence's row.
template <int WARPS>
__device__ __forceinline__ void attend_blocks(State& s, const AttentionArgs& a, const int32_t* table, int head, const uint4 (&q)[2],
                                              int first, int last, int kv_start, int low, int high) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const float scale = a.sm_scale * kLog2e;
  constexpr int kSteps = kChunkBlocks / WARPS;
  for (int base = first; base < last; base += kChunkBlocks) {
    const int ids = base + lane < last ? __ldg(table + base + lane) : 0;
    Keys keys[2];
    if (base + warp < last) load_keys(keys[0], a, __shfl_sync(0xFFFFFFFFu, ids, warp), head, g, c);
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const int block = base + warp + step * WARPS;
      if (block >= last) break;
      if (step + 1 < kSteps && block + WARPS < last)
        load_keys(keys[(step + 1) % 2], a, __shfl_sync(0xFFFFFFFFu, ids, warp + (step + 1) * WARPS), head, g, c);
      attend(s, keys[step % 2], q, kv_start + block * kBlockSize, low, high, scale, c);
    }
  }
}

__device__ __forceinline__ void load_query(uint4 (&q)[2], const AttentionArgs& a, int b, int head, int g, int c) {
  const uint16_t* row = a.q + (static_cast<size_t>(b) * a.kv_heads * a.group + head * a.group + g) * kHeadDim + 8 * c;
#pragma unroll
  for (int half = 0; half < 2; half++) q[half] = g < a.group ? load_global_16(row + half * 32) : make_uint4(0, 0, 0, 0);
}

// Warps' states to shared memory: stats [WARPS][8][2], acc [WARPS][8][64].
__device__ __forceinline__ void store_state(const State& s, float* stats, float* acc) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  float sum = s.sum;
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  if (c == 0) {
    stats[(warp * kGroup + g) * 2] = s.top;
    stats[(warp * kGroup + g) * 2 + 1] = sum;
  }
  float* row = acc + (warp * kGroup + g) * kHeadDim;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    *reinterpret_cast<float4*>(row + 16 * c + i) = make_float4(s.acc[i][0], s.acc[i + 1][0], s.acc[i + 2][0], s.acc[i + 3][0]);
    *reinterpret_cast<float4*>(row + 16 * c + 8 + i) = make_float4(s.acc[i][1], s.acc[i + 1][1], s.acc[i + 2][1], s.acc[i + 3][1]);
  }
}

__device__ __forceinline__ void finish(const AttentionArgs& a, int b, int head, int h, int d, float value, float top, float sum) {
  const float sink = __ldg(a.sink + head * a.group + h) * kLog2e;
  const float all = fmaxf(top, sink);
  const float shrink = exp2f(top - all);
  a.out[(static_cast<size_t>(b) * a.kv_heads * a.group + head * a.group + h) * kHeadDim + d] =
      bf16_from_float(value * shrink / (sum * shrink + exp2f(sink - all)));
}

// Adds the warps' states out of shared memory. Returns the sum; its maximum and divisor go to `top` and `sum`.
template <int PARTS>
__device__ __forceinline__ float merge_warps(const float* stats, const float* acc, float& top, float& sum) {
#pragma unroll
  for (int w = 0; w < PARTS; w++) top = fmaxf(top, stats[w * kGroup * 2]);
  float value = 0.0f;
#pragma unroll
  for (int w = 0; w < PARTS; w++) {
    const float weight = exp2f(stats[w * kGroup * 2] - top);
    sum += stats[w * kGroup * 2 + 1] * weight;
    value += acc[w * kGroup * kHeadDim] * weight;
  }
  return value;
}

// grid (kv_heads, batch): all visible keys of one sequence and KV head.
template <int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 3) attention_sliding(AttentionArgs a) {
  __shared__ float stats[WARPS * kGroup * 2];
  __shared__ __align__(16) float acc[WARPS * kGroup * kHeadDim];
  const int head = blockIdx.x, b = blockIdx.y;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  wait_for_previous_kernel();
  start_next_kernel();
  const int seq_len = __ldg(a.seq_lens + b), kv_start = a.kv_start ? __ldg(a.kv_start + b) : 0;
  const int low = a.window > 0 ? max(seq_len - a.window, kv_start) : kv_start;
  uint4 q[2];
  load_query(q, a, b, head, g, c);
  State s = {};
  s.top = -INFINITY;
  if (seq_len > 0)
    attend_blocks<WARPS>(s, a, a.block_table + static_cast<size_t>(b) * a.table_stride, head, q, (low - kv_start) / kBlockSize,
                         (seq_len - kv_start + kBlockSize - 1) / kBlockSize, kv_start, low, seq_len);
  store_state(s, stats, acc);
  __syncthreads();
  for (int i = threadIdx.x; i < a.group * kHeadDim; i += WARPS * 32) {
    const int h = i / kHeadDim, d = i % kHeadDim;
    float top = -1e30f, sum = 0.0f;
    const float value = merge_warps<WARPS>(stats + h * 2, acc + i, top, sum);
    finish(a, b, head, h, d, value, top, sum);
  }
}

// One chunk of one sequence for one KV head.
struct Item {
  int b, head, seq_len, first, last, first_chunk, chunks;  // blocks [first, last); the sequence's chunks
};

// What the warps of a block look up again and again.
struct Plan {
  int cu_chunks[kMaxBatch + 1];
  int seq_lens[kMaxBatch];
};

__device__ __forceinline__ Item locate(const AttentionArgs& a, const Plan& plan, int item) {
  const int chunk = item / a.kv_heads;
  int b = 0;
#pragma unroll
  for (int step = kMaxBatch / 2; step > 0; step >>= 1)
    if (b + step < a.batch && plan.cu_chunks[b + step] <= chunk) b += step;
  const int seq_len = plan.seq_lens[b], blocks = (seq_len + kBlockSize - 1) / kBlockSize;
  const int each = kChunkBlocks * ((blocks + kChunkBlocks * kMaxChunks - 1) / (kChunkBlocks * kMaxChunks));
  const int first = (chunk - plan.cu_chunks[b]) * each;
  return {b, item % a.kv_heads, seq_len, first, min(first + each, blocks), plan.cu_chunks[b], plan.cu_chunks[b + 1] - plan.cu_chunks[b]};
}

// One warp's ring of KV blocks, asked for across the items of its block. Each lane asks for the 16-byte pieces that it alone will read.
template <int WARPS, int STAGES>
struct KeyStream {
  static constexpr int kBytes = 4 * kBlockSize * kHeadDim;  // keys and values of a block
  struct Piece {
    int base, last, head, ids;  // up to 32 blocks from `base`; lane i holds the id of block base + i
  };
  unsigned char* ring;  // this lane's
  const AttentionArgs* args;
  const Plan* plan;
  int items, next_item, step, slot;
  Piece now, next;

  __device__ __forceinline__ void look_up(int b) {
    const int lane = threadIdx.x % 32;
    next.ids = next.base + lane < next.last ? __ldg(args->block_table + static_cast<size_t>(b) * args->table_stride + next.base + lane) : 0;
  }
  // Moves on to the next piece and looks up the ids of the one after it, which are thus there when they are needed.
  __device__ __forceinline__ void advance() {
    now = next;
    step = 0;
    next.base += kChunkBlocks;
    if (next.base < next.last) {
      look_up(locate(*args, *plan, next_item).b);
      return;
    }
    next_item += gridDim.x;
    if (next_item < items) {
      const Item item = locate(*args, *plan, next_item);
      next = {item.first, item.last, item.head, 0};
      look_up(item.b);
    } else {
      next = {0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void start() {
    next_item = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    next = {0, 0, 0, 0};
    advance();
    advance();
#pragma unroll
    for (int i = 0; i < STAGES; i++) ask();
  }
  __device__ __forceinline__ void ask() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    while (now.base < now.last && (step * WARPS >= kChunkBlocks || now.base + warp + step * WARPS >= now.last)) advance();
    if (now.base < now.last) {
      const int block = __shfl_sync(0xFFFFFFFFu, now.ids, warp + step * WARPS);
      const uint16_t* k = args->kv_pool + (static_cast<size_t>(block) * 2 * args->kv_heads + now.head) * kBlockSize * kHeadDim;
      const uint16_t* v = k + static_cast<size_t>(args->kv_heads) * kBlockSize * kHeadDim;
      unsigned char* to = ring + slot * kBytes;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        copy_async_16(to + i * 512, k + (i / 2 * 8 + g) * kHeadDim + i % 2 * 32 + 8 * c);
        copy_async_16(to + 2048 + i * 512, v + (i / 2 * 8 + 2 * c + i % 2) * kHeadDim + 8 * g);
      }
      step++;
    }
    copy_async_commit();
    if (++slot == STAGES) slot = 0;
  }
  // The oldest block asked for.
  __device__ __forceinline__ void take(Keys& keys, int at) const {
    copy_async_wait<STAGES - 1>();
    const unsigned char* from = ring + at * kBytes;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      keys.k[i / 2][i % 2] = *reinterpret_cast<const uint4*>(from + i * 512);
      keys.v[i] = *reinterpret_cast<const uint4*>(from + 2048 + i * 512);
    }
  }
};

constexpr int kAdders = 4;  // warps that add the others' states, two heads each
constexpr int kStates = 2;  // items between the two

// States on their way from the key warps to the adding warps.
struct States {
  uint64_t* done;  // [kStates], one arrival a key warp
  uint64_t* free;  // [kStates], one arrival an adding warp
  float* stats;    // [kStates][warps][8][2]
  float* acc;      // [kStates][warps][8][64]
};

__device__ __forceinline__ void add_state(float4& value, float& sum, float top, float part_top, float part_sum, const float4& part) {
  const float weight = exp2f(part_top - top);
  sum += part_sum * weight;
  value.x += part.x * weight, value.y += part.y * weight, value.z += part.z * weight, value.w += part.w * weight;
}

__device__ __forceinline__ void finish_four(const AttentionArgs& a, const Item& item, int h, int d, const float4& value, float top, float sum) {
  if (h >= a.group) return;
  const float sink = __ldg(a.sink + item.head * a.group + h) * kLog2e;
  const float all = fmaxf(top, sink), shrink = exp2f(top - all);
  const float factor = shrink / (sum * shrink + exp2f(sink - all));
  uint16_t* to = a.out + ((static_cast<size_t>(item.b) * a.kv_heads + item.head) * a.group + h) * kHeadDim + d;
  *reinterpret_cast<uint2*>(to) = make_uint2(bf16x2_pack(value.x * factor, value.y * factor), bf16x2_pack(value.z * factor, value.w * factor));
}

// One adding warp: sums the key warps' states of every item, and the one that adds a sequence's last chunk sums the chunks.
template <int WARPS>
__device__ __forceinline__ void add_states(const AttentionArgs& a, const Plan& plan, const States& states, int items) {
  const int lane = threadIdx.x % 32, adder = threadIdx.x / 32 - WARPS, h = adder * 2 + lane / 16, d = lane % 16 * 4;
  int turn = 0;
  for (int at = blockIdx.x; at < items; at += gridDim.x, turn++) {
    const Item item = locate(a, plan, at);
    const int slot = turn % kStates;
    barrier_wait(states.done + slot, turn / kStates & 1);
    const float* stats = states.stats + (slot * WARPS * kGroup + h) * 2;
    const float* acc = states.acc + (slot * WARPS * kGroup + h) * kHeadDim + d;
    float top = -1e30f, sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, stats[w * kGroup * 2]);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      add_state(value, sum, top, stats[w * kGroup * 2], stats[w * kGroup * 2 + 1], *reinterpret_cast<const float4*>(acc + w * kGroup * kHeadDim));
    __syncwarp();
    if (lane == 0) barrier_arrive(states.free + slot);
    if (item.chunks == 1) {
      finish_four(a, item, h, d, value, top, sum);
      continue;
    }
    *reinterpret_cast<float4*>(a.partial_acc + (static_cast<size_t>(at) * kGroup + h) * kHeadDim + d) = value;
    if (d == 0) *reinterpret_cast<float2*>(a.partial_stats + (static_cast<size_t>(at) * kGroup + h) * 2) = make_float2(top, sum);
    __threadfence();
    __syncwarp();
    int before = 0;
    int32_t* counter = a.arrived + (item.b * a.kv_heads + item.head) * kAdders + adder;
    if (lane == 0) before = atomicAdd(counter, 1);
    if (__shfl_sync(0xFFFFFFFFu, before, 0) != item.chunks - 1) continue;
    if (lane == 0) *counter = 0;
    __threadfence();
    const size_t first = static_cast<size_t>(item.first_chunk) * a.kv_heads + item.head, stride = static_cast<size_t>(a.kv_heads) * kGroup;
    const float* chunk_stats = a.partial_stats + (first * kGroup + h) * 2;
    const float* chunk_acc = a.partial_acc + (first * kGroup + h) * kHeadDim + d;
    top = -1e30f, sum = 0.0f;
    value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int i = 0; i < item.chunks; i++) top = fmaxf(top, __ldcg(chunk_stats + i * stride * 2));
#pragma unroll 8
    for (int i = 0; i < item.chunks; i++) {
      const uint4 part = load_global_16(chunk_acc + i * stride * kHeadDim);
      add_state(value, sum, top, __ldcg(chunk_stats + i * stride * 2), __ldcg(chunk_stats + i * stride * 2 + 1),
                make_float4(__uint_as_float(part.x), __uint_as_float(part.y), __uint_as_float(part.z), __uint_as_float(part.w)));
    }
    finish_four(a, item, h, d, value, top, sum);
  }
}

template <int WARPS, int STAGES>
__device__ __forceinline__ void attend_items(const AttentionArgs& a, const Plan& plan, const States& states, unsigned char* ring, int items) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  KeyStream<WARPS, STAGES> stream = {ring + warp * STAGES * KeyStream<WARPS, STAGES>::kBytes + lane * 16, &a, &plan, items};
  stream.start();
  const float scale = a.sm_scale * kLog2e;
  int turn = 0, taken = 0;
  for (int at = blockIdx.x; at < items; at += gridDim.x, turn++) {
    const Item item = locate(a, plan, at);
    uint4 q[2];
    load_query(q, a, item.b, item.head, g, c);
    State s = {};
    s.top = -INFINITY;
    for (int block = item.first + warp; block < item.last; block += WARPS) {
      Keys keys;
      stream.take(keys, taken);
      attend(s, keys, q, block * kBlockSize, 0, item.seq_len, scale, c);
      stream.ask();
      if (++taken == STAGES) taken = 0;
    }
    const int slot = turn % kStates;
    barrier_wait(states.free + slot, (turn / kStates & 1) ^ 1);
    store_state(s, states.stats + slot * WARPS * kGroup * 2, states.acc + slot * WARPS * kGroup * kHeadDim);
    __syncwarp();
    if (lane == 0) barrier_arrive(states.done + slot);
  }
  copy_async_wait<0>();
}

// Persistent: walks (chunk, KV head) items of all sequences.
template <int WARPS, int STAGES, int RESIDENT>
__global__ void __launch_bounds__((WARPS + kAdders) * 32, RESIDENT) attention_full(const __grid_constant__ AttentionArgs a) {
  DYNAMIC_SHARED(shared);
  __shared__ Plan plan;
  __shared__ __align__(8) uint64_t barriers[2 * kStates];
  float* acc = reinterpret_cast<float*>(shared + WARPS * STAGES * KeyStream<WARPS, STAGES>::kBytes);
  const States states = {barriers, barriers + kStates, acc + kStates * WARPS * kGroup * kHeadDim, acc};
  if (threadIdx.x < 2 * kStates) barrier_init(barriers + threadIdx.x, threadIdx.x < kStates ? WARPS : kAdders);
  barrier_init_fence();
  wait_for_previous_kernel();
  start_next_kernel();
  for (int i = threadIdx.x; i <= a.batch; i += blockDim.x) plan.cu_chunks[i] = __ldcg(a.cu_chunks + i);
  for (int i = threadIdx.x; i < a.batch; i += blockDim.x) plan.seq_lens[i] = __ldcg(a.seq_lens + i);
  __syncthreads();
  const int row = a.kv_heads * a.group * kHeadDim;
  for (int b = blockIdx.x; b < a.batch; b += gridDim.x)  // padded rows: finite, so that no NaN spreads
    if (plan.seq_lens[b] == 0)
      for (int i = threadIdx.x; i < row; i += blockDim.x) a.out[static_cast<size_t>(b) * row + i] = 0;
  const int items = plan.cu_chunks[a.batch] * a.kv_heads;
  if (static_cast<int>(threadIdx.x) / 32 < WARPS)
    attend_items<WARPS, STAGES>(a, plan, states, shared, items);
  else
    add_states<WARPS>(a, plan, states, items);
}

template <int WARPS, int STAGES, int RESIDENT>
int launch_attention(const AttentionArgs& a, int processors, void* stream) {
  constexpr int kShared = WARPS * STAGES * KeyStream<WARPS, STAGES>::kBytes + kStates * WARPS * kGroup * (kHeadDim + 2) * 4;
  static_assert((kShared + 3 * 1024) * RESIDENT <= 227 * 1024, "more shared memory than a multiprocessor has");
  return launch(attention_full<WARPS, STAGES, RESIDENT>, dim3(RESIDENT * processors), (WARPS + kAdders) * 32, kShared, stream, a);
}

}  // namespace

extern "C" int tandem_attention_sliding(const void* q, const void* kv_pool, const void* block_table, const void* kv_start,
                                        const void* seq_lens, const void* sink, void* out, int batch, int kv_heads, int group,
                                        int table_stride, int window, float sm_scale, void* stream) {
  if (group > kGroup) return -1;
  const AttentionArgs a = {static_cast<const uint16_t*>(q), static_cast<const uint16_t*>(kv_pool), static_cast<const int32_t*>(block_table),
                           static_cast<const int32_t*>(kv_start), static_cast<const int32_t*>(seq_lens), static_cast<const float*>(sink),
                           static_cast<uint16_t*>(out), nullptr, nullptr, nullptr, nullptr, batch, kv_heads, group, table_stride, window,
                           sm_scale};
  return launch(attention_sliding<4>, dim3(kv_heads, batch), 128, 0, stream, a);
}

// cu_chunks comes from tandem_prepare_step, which cuts with the same rule. partial_*: one entry a chunk and KV head.
extern "C" int tandem_attention_full(const void* q, const void* kv_pool, const void* block_table, const void* seq_lens, const void* sink,
                                     void* out, const void* cu_chunks, void* partial_acc, void* partial_stats, void* arrived, int batch,
                                     int kv_heads, int group, int table_stride, float sm_scale, int processors, void* stream) {
  if (group > kGroup || batch > kMaxBatch) return -1;
  const AttentionArgs a = {static_cast<const uint16_t*>(q), static_cast<const uint16_t*>(kv_pool), static_cast<const int32_t*>(block_table),
                           nullptr, static_cast<const int32_t*>(seq_lens), static_cast<const float*>(sink), static_cast<uint16_t*>(out),
                           static_cast<const int32_t*>(cu_chunks), static_cast<float*>(partial_acc), static_cast<float*>(partial_stats),
                           static_cast<int32_t*>(arrived), batch, kv_heads, group, table_stride, 0, sm_scale};
  return launch_attention<4, 4, 2>(a, processors, stream);
}
