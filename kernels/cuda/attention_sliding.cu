// Decode attention of sliding layers: one query a sequence, up to eight query heads on one KV head, head_dim 64, in one launch without splits.
// A warp takes whole KV blocks of 16 keys straight from memory to registers; warps merge in shared memory.
#include "attention.cuh"

namespace {

struct AttentionArgs {
  const uint16_t* q;           // [batch, kv_heads * group, 64]
  const uint16_t* kv_pool;     // [blocks, 2, kv_heads, 16, 64]
  const int32_t* block_table;  // [batch, table_stride]
  const int32_t* kv_start;     // [batch]
  const int32_t* seq_lens;     // [batch], 0 for a padded row
  const float* sink;           // [kv_heads * group]
  uint16_t* out;               // [batch, kv_heads * group, 64]
  int kv_heads, group, table_stride, window;
  float sm_scale;
};

constexpr int kTableBlocks = 32;  // block ids that a warp looks up at once

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

// All KV blocks [first, last) of one sequence and KV head, shared out over the warps. `table` is the sequence's row.
template <int WARPS>
__device__ __forceinline__ void attend_blocks(State& s, const AttentionArgs& a, const int32_t* table, int head, const uint4 (&q)[2],
                                              int first, int last, int kv_start, int low, int high, int ids) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const float scale = a.sm_scale * kLog2e;
  constexpr int kSteps = kTableBlocks / WARPS;
  for (int base = first; base < last; base += kTableBlocks) {
    if (base > first) ids = base + lane < last ? __ldg(table + base + lane) : 0;
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
__global__ void __launch_bounds__(WARPS * 32, 4) attention_sliding(AttentionArgs a) {
  __shared__ float stats[WARPS * kGroup * 2];
  __shared__ __align__(16) float acc[WARPS * kGroup * kHeadDim];
  const int head = blockIdx.x, b = blockIdx.y;
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  // Lengths and tables are older than the kernel ahead, and so are all keys but those of the newest block.
  const int seq_len = __ldg(a.seq_lens + b), kv_start = __ldg(a.kv_start + b);
  const int low = max(seq_len - a.window, kv_start), first = (low - kv_start) / kBlockSize;
  const int last = seq_len > 0 ? (seq_len - kv_start + kBlockSize - 1) / kBlockSize : first;
  const int32_t* table = a.block_table + static_cast<size_t>(b) * a.table_stride;
  const int ids = first + lane < last ? __ldg(table + first + lane) : 0;
  if (threadIdx.x < 32 && first + lane < last) {
    const uint16_t* k = a.kv_pool + (static_cast<size_t>(ids) * 2 * a.kv_heads + head) * kBlockSize * kHeadDim;
    prefetch_bulk(k, 2 * kBlockSize * kHeadDim);
    prefetch_bulk(k + static_cast<size_t>(a.kv_heads) * kBlockSize * kHeadDim, 2 * kBlockSize * kHeadDim);
  }
  wait_for_previous_kernel();
  start_next_kernel();
  uint4 q[2];
  load_query(q, a, b, head, g, c);
  State s = {};
  s.top = -INFINITY;
  if (seq_len > 0) attend_blocks<WARPS>(s, a, table, head, q, first, last, kv_start, low, seq_len, ids);
  store_state(s, stats, acc);
  __syncthreads();
  for (int i = threadIdx.x; i < a.group * kHeadDim; i += WARPS * 32) {
    const int h = i / kHeadDim, d = i % kHeadDim;
    float top = -1e30f, sum = 0.0f;
    const float value = merge_warps<WARPS>(stats + h * 2, acc + i, top, sum);
    finish(a, b, head, h, d, value, top, sum);
  }
}

}  // namespace

extern "C" int tandem_attention_sliding(const void* q, const void* kv_pool, const void* block_table, const void* kv_start,
                                        const void* seq_lens, const void* sink, void* out, int batch, int kv_heads, int group,
                                        int table_stride, int window, float sm_scale, void* stream) {
  if (group > kGroup) return -1;
  const AttentionArgs a = {static_cast<const uint16_t*>(q), static_cast<const uint16_t*>(kv_pool), static_cast<const int32_t*>(block_table),
                           static_cast<const int32_t*>(kv_start), static_cast<const int32_t*>(seq_lens), static_cast<const float*>(sink),
                           static_cast<uint16_t*>(out), kv_heads, group, table_stride, window, sm_scale};
  return launch(attention_sliding<4>, dim3(kv_heads, batch), 128, 0, stream, a);
}
