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
  int32_t* arrived;            // [batch, kv_heads], zero before and after
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

// Adds `parts` states with the given distance between them; the sink, when given, counts once. Returns the sum, its maximum and divisor.
__device__ __forceinline__ float merge(const float* stats, const float* acc, int parts, size_t stats_stride, size_t acc_stride, float& top,
                                       float& sum) {
  for (int i = 0; i < parts; i++) top = fmaxf(top, __ldcg(stats + i * stats_stride));
  float value = 0.0f;
#pragma unroll 4
  for (int i = 0; i < parts; i++) {
    const float weight = exp2f(__ldcg(stats + i * stats_stride) - top);
    sum += __ldcg(stats + i * stats_stride + 1) * weight;
    value += __ldcg(acc + i * acc_stride) * weight;
  }
  return value;
}

__device__ __forceinline__ void finish(const AttentionArgs& a, int b, int head, int h, int d, float value, float top, float sum) {
  const float sink = __ldg(a.sink + head * a.group + h) * kLog2e;
  const float all = fmaxf(top, sink);
  const float shrink = exp2f(top - all);
  a.out[(static_cast<size_t>(b) * a.kv_heads * a.group + head * a.group + h) * kHeadDim + d] =
      bf16_from_float(value * shrink / (sum * shrink + exp2f(sink - all)));
}

// Same as `merge`, out of shared memory.
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

__device__ __forceinline__ int chunk_blocks(int seq_len) {
  const int blocks = (seq_len + kBlockSize - 1) / kBlockSize;
  const int each = kChunkBlocks * kMaxChunks;
  return kChunkBlocks * ((blocks + each - 1) / each);
}

// Persistent: walks (chunk, KV head) items of all sequences.
template <int WARPS, int RESIDENT>
__global__ void __launch_bounds__(WARPS * 32, RESIDENT) attention_full(AttentionArgs a) {
  __shared__ float stats[WARPS * kGroup * 2];
  __shared__ __align__(16) float acc[WARPS * kGroup * kHeadDim];
  __shared__ int cu_chunks[kMaxBatch + 1];
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  wait_for_previous_kernel();
  start_next_kernel();
  for (int i = threadIdx.x; i <= a.batch; i += WARPS * 32) cu_chunks[i] = __ldcg(a.cu_chunks + i);
  for (int i = blockIdx.x * WARPS * 32 + threadIdx.x; i < a.batch * a.kv_heads * a.group * kHeadDim; i += gridDim.x * WARPS * 32)
    if (__ldg(a.seq_lens + i / (a.kv_heads * a.group * kHeadDim)) == 0) a.out[i] = 0;  // padded rows: finite, so that no NaN spreads
  __syncthreads();
  const int items = cu_chunks[a.batch] * a.kv_heads;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int chunk = item / a.kv_heads, head = item % a.kv_heads;
    int b = 0;
    for (int step = 64; step > 0; step >>= 1)
      if (b + step < a.batch && cu_chunks[b + step] <= chunk) b += step;
    const int first_chunk = cu_chunks[b], chunks = cu_chunks[b + 1] - first_chunk;
    const int seq_len = __ldg(a.seq_lens + b), each = chunk_blocks(seq_len);
    const int first = (chunk - first_chunk) * each, last = min(first + each, (seq_len + kBlockSize - 1) / kBlockSize);
    uint4 q[2];
    load_query(q, a, b, head, g, c);
    State s = {};
    s.top = -INFINITY;
    attend_blocks<WARPS>(s, a, a.block_table + static_cast<size_t>(b) * a.table_stride, head, q, first, last, 0, 0, seq_len);
    store_state(s, stats, acc);
    __syncthreads();
    for (int i = threadIdx.x; i < a.group * kHeadDim; i += WARPS * 32) {
      const int h = i / kHeadDim;
      float top = -1e30f, sum = 0.0f;
      const float value = merge_warps<WARPS>(stats + h * 2, acc + i, top, sum);
      if (chunks == 1) {
        finish(a, b, head, h, i % kHeadDim, value, top, sum);
      } else {
        a.partial_acc[static_cast<size_t>(item) * kGroup * kHeadDim + i] = value;
        if (i % kHeadDim == 0) {
          a.partial_stats[(static_cast<size_t>(item) * kGroup + h) * 2] = top;
          a.partial_stats[(static_cast<size_t>(item) * kGroup + h) * 2 + 1] = sum;
        }
      }
    }
    if (chunks > 1) __threadfence();
    __syncthreads();
    if (chunks == 1) continue;
    if (threadIdx.x == 0) {
      int32_t* counter = a.arrived + b * a.kv_heads + head;
      is_last = atomicAdd(counter, 1) == chunks - 1;
      if (is_last) *counter = 0;
    }
    __syncthreads();
    if (is_last) {
      __threadfence();
      const size_t at = static_cast<size_t>(first_chunk) * a.kv_heads + head;
      for (int i = threadIdx.x; i < a.group * kHeadDim; i += WARPS * 32) {
        const int h = i / kHeadDim;
        float top = -1e30f, sum = 0.0f;
        const float value = merge(a.partial_stats + (at * kGroup + h) * 2, a.partial_acc + at * kGroup * kHeadDim + i, chunks,
                                  static_cast<size_t>(a.kv_heads) * kGroup * 2, static_cast<size_t>(a.kv_heads) * kGroup * kHeadDim, top, sum);
        finish(a, b, head, h, i % kHeadDim, value, top, sum);
      }
    }
    __syncthreads();
  }
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
                                     int kv_heads, int group, int table_stride, float sm_scale, int processors, int variant, void* stream) {
  if (group > kGroup || batch > kMaxBatch) return -1;
  const AttentionArgs a = {static_cast<const uint16_t*>(q), static_cast<const uint16_t*>(kv_pool), static_cast<const int32_t*>(block_table),
                           nullptr, static_cast<const int32_t*>(seq_lens), static_cast<const float*>(sink), static_cast<uint16_t*>(out),
                           static_cast<const int32_t*>(cu_chunks), static_cast<float*>(partial_acc), static_cast<float*>(partial_stats),
                           static_cast<int32_t*>(arrived), batch, kv_heads, group, table_stride, 0, sm_scale};
  switch (variant) {
    case 0: return launch(attention_full<8, 2>, dim3(2 * processors), 256, 0, stream, a);
    case 1: return launch(attention_full<4, 3>, dim3(3 * processors), 128, 0, stream, a);
    case 2: return launch(attention_full<8, 1>, dim3(processors), 256, 0, stream, a);
    default: return -1;
  }
}
