// Small fused steps of a decode step: its plan (rotations, slots, attention chunks), embedding or expert combination with residual and
// RMSNorm, and, for batches whose products a library does, bias + rotary embedding + K/V write and bias + residual.
#include "primitives.cuh"

namespace {

constexpr int kMaxChunks = 32;  // as in attention_full.cu
constexpr int kMaxBatch = 128;

struct StepArgs {
  const int32_t* token_source;    // [batch] row of token_ids, or -1 - token id
  int32_t* token_ids;             // the step before's tokens in, this step's out
  const int32_t* seq_lens;        // [batch], counting the new token; 0 for a padded row
  const int32_t* full_table;      // [batch, full_stride]
  const int32_t* sliding_table;   // [batch, sliding_stride]
  const int32_t* sliding_start;   // [batch] position of the first token in the sliding table
  const float* inv_freq;          // [32]
  float* cos_sin;                 // [batch, 32, 2]
  int32_t* full_slots;            // [batch], -1 for a padded row
  int32_t* sliding_slots;
  int32_t* cu_chunks;             // [batch + 1]
  int batch, full_stride, sliding_stride, block_size, chunk_blocks;
  float concentration;
};

__global__ void __launch_bounds__(256) prepare_step(StepArgs a) {
  __shared__ int chunks[kMaxBatch];
  wait_for_previous_kernel();
  start_next_kernel();
  int token = 0;
  if (static_cast<int>(threadIdx.x) < a.batch) {
    const int source = __ldcg(a.token_source + threadIdx.x);
    token = source < 0 ? -1 - source : __ldcg(a.token_ids + source);
  }
  __syncthreads();  // rows change places
  if (static_cast<int>(threadIdx.x) < a.batch) a.token_ids[threadIdx.x] = token;
  for (int i = threadIdx.x; i < a.batch; i += blockDim.x) {
    const int n = __ldcg(a.seq_lens + i), at = n - 1;
    const int blocks = (n + a.block_size - 1) / a.block_size, most = a.chunk_blocks * kMaxChunks;
    const int size = a.chunk_blocks * ((blocks + most - 1) / most);
    chunks[i] = n > 0 ? (blocks + size - 1) / size : 0;
    int full = -1, sliding = -1;
    if (n > 0) {
      full = __ldcg(a.full_table + static_cast<size_t>(i) * a.full_stride + at / a.block_size) * a.block_size + at % a.block_size;
      const int local = at - __ldcg(a.sliding_start + i);
      sliding = __ldcg(a.sliding_table + static_cast<size_t>(i) * a.sliding_stride + local / a.block_size) * a.block_size + local % a.block_size;
    }
    a.full_slots[i] = full;
    a.sliding_slots[i] = sliding;
  }
  for (int i = threadIdx.x; i < a.batch * 32; i += blockDim.x) {
    const float angle = static_cast<float>(max(__ldcg(a.seq_lens + i / 32) - 1, 0)) * __ldg(a.inv_freq + i % 32);
    a.cos_sin[2 * i] = cosf(angle) * a.concentration;
    a.cos_sin[2 * i + 1] = sinf(angle) * a.concentration;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < a.batch; i++) {
      a.cu_chunks[i] = sum;
      sum += chunks[i];
    }
    a.cu_chunks[a.batch] = sum;
  }
}

constexpr int kMaxChoices = 8;

struct CombineArgs {
  const int32_t* token_ids;     // [tokens] with `embedding`, else null
  const uint16_t* embedding;    // [vocab, columns]
  const uint16_t* pairs;        // [tokens, choices, columns] expert outputs, or null; sorted: [rows, columns]
  const int32_t* expert_ids;    // [tokens, choices]; sorted: rows of `pairs`, -1 for none
  const float* expert_weights;  // [tokens, choices]
  uint16_t* residual;           // [tokens, columns] in and out
  const uint16_t* norm_weight;  // [columns]
  uint16_t* normed;             // [tokens, columns]
  int columns, choices, first_expert, experts;
  float eps;
};

// grid (tokens): eight columns a thread. residual = embedding row, or residual + weighted expert outputs; normed = RMSNorm of it.
// At most 40 registers: a block then finds room beside one of the 4-bit experts kernel for few tokens; the FP8 one, which sorts, has no room.
template <bool SORTED>
__global__ void __launch_bounds__(512, SORTED ? 2 : 3) combine_norm(CombineArgs a) {
  __shared__ float sums[16];
  const int token = blockIdx.x, at = threadIdx.x * 8;
  const bool active = at < a.columns;
  uint4 norm = make_uint4(0, 0, 0, 0);
  if (active) norm = __ldg(reinterpret_cast<const uint4*>(a.norm_weight + at));
  // The next kernel may start while the one ahead still runs: all it does before its own wait is to ask for weights. Ids, weights and residual
  // are older than the kernel ahead.
  start_next_kernel();
  uint4 old = make_uint4(0, 0, 0, 0);
  uint32_t local = 0;  // choices whose experts are here
  float weight[kMaxChoices] = {};
  int row[kMaxChoices] = {};
  if (a.pairs) {
    if (active) old = load_global_16(a.residual + static_cast<size_t>(token) * a.columns + at);
#pragma unroll
    for (int k = 0; k < kMaxChoices; k++)
      if (k < a.choices) {
        const int e = __ldcg(a.expert_ids + token * a.choices + k);
        local |= static_cast<uint32_t>(SORTED ? e >= 0 : e >= a.first_expert && e < a.first_expert + a.experts) << k;
        if (SORTED) row[k] = e;
        weight[k] = __ldcg(a.expert_weights + token * a.choices + k);
      }
  }
  wait_for_previous_kernel();
  float x[8] = {};
  auto add = [&](const uint4& v, float weight) {
    x[0] += bf16_low(v.x) * weight, x[1] += bf16_high(v.x) * weight, x[2] += bf16_low(v.y) * weight, x[3] += bf16_high(v.y) * weight;
    x[4] += bf16_low(v.z) * weight, x[5] += bf16_high(v.z) * weight, x[6] += bf16_low(v.w) * weight, x[7] += bf16_high(v.w) * weight;
  };
  uint4 stored = make_uint4(0, 0, 0, 0);
  if (active) {
    if (a.pairs) {
#pragma unroll
      for (int k = 0; k < kMaxChoices; k++)
        if (local >> k & 1) {
          const size_t from = SORTED ? row[k] : static_cast<size_t>(token) * a.choices + k;
          add(load_global_16(a.pairs + from * a.columns + at), weight[k]);
        }
    } else {
      old = load_global_16(a.embedding + static_cast<size_t>(max(__ldcg(a.token_ids + token), 0)) * a.columns + at);
    }
    add(old, 1.0f);
    stored = make_uint4(bf16x2_pack(x[0], x[1]), bf16x2_pack(x[2], x[3]), bf16x2_pack(x[4], x[5]), bf16x2_pack(x[6], x[7]));
    *reinterpret_cast<uint4*>(a.residual + static_cast<size_t>(token) * a.columns + at) = stored;
  }
  auto square = [](uint32_t v) { return bf16_low(v) * bf16_low(v) + bf16_high(v) * bf16_high(v); };
  float sum = warp_sum(square(stored.x) + square(stored.y) + square(stored.z) + square(stored.w));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; w++) sum += sums[w];
  const float scale = rsqrtf(sum / a.columns + a.eps);
  auto scaled = [&](uint32_t v, uint32_t w) { return bf16x2_pack(bf16_low(v) * scale * bf16_low(w), bf16_high(v) * scale * bf16_high(w)); };
  if (active)
    *reinterpret_cast<uint4*>(a.normed + static_cast<size_t>(token) * a.columns + at) =
        make_uint4(scaled(stored.x, norm.x), scaled(stored.y, norm.y), scaled(stored.z, norm.z), scaled(stored.w, norm.w));
}

struct RotateArgs {
  const uint16_t* qkv;      // [tokens, heads * 64], columns in the packed weights' row order
  const uint16_t* bias;     // [heads * 64], same order
  uint16_t* q;              // [tokens, q_heads, 64]
  uint16_t* kv_pool;        // [blocks, 2, kv_heads, block_size, 64]
  const int32_t* slots;     // [tokens]
  const float* cos_sin;     // [tokens, 32, 2]
  int q_heads, kv_heads, block_size;
};

// Adds the bias to dimensions d and d + 1 (`top`) and d + 32 and d + 33, and turns them by cosine and sine of d, of d + 1.
__device__ __forceinline__ void rotate_pair(uint32_t& top, uint32_t& bottom, uint32_t top_bias, uint32_t bottom_bias, const float4& turn,
                                            bool is_rotated) {
  const float x1[2] = {bf16_low(top) + bf16_low(top_bias), bf16_high(top) + bf16_high(top_bias)};
  const float x2[2] = {bf16_low(bottom) + bf16_low(bottom_bias), bf16_high(bottom) + bf16_high(bottom_bias)};
  if (is_rotated) {
    top = bf16x2_pack(x1[0] * turn.x - x2[0] * turn.y, x1[1] * turn.z - x2[1] * turn.w);
    bottom = bf16x2_pack(x2[0] * turn.x + x1[0] * turn.y, x2[1] * turn.z + x1[1] * turn.w);
  } else {
    top = bf16x2_pack(x1[0], x1[1]);
    bottom = bf16x2_pack(x2[0], x2[1]);
  }
}

// grid (tokens), dimensions d .. d + 7 and d + 32 .. d + 39 of a head a thread.
__global__ void __launch_bounds__(512) rotate_write(RotateArgs a) {
  const int token = blockIdx.x, pieces = (a.q_heads + 2 * a.kv_heads) * 4;
  wait_for_previous_kernel();
  start_next_kernel();
  const int slot = __ldg(a.slots + token);
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
    const int head = i / 4, d = i % 4 * 8;
    const uint16_t* from = a.qkv + static_cast<size_t>(token) * pieces * 16 + i * 16;
    const uint16_t* bias = a.bias + i * 16;
    uint4 top = load_global_16(from), bottom = load_global_16(from + 8);
    const uint4 top_bias = __ldg(reinterpret_cast<const uint4*>(bias)), bottom_bias = __ldg(reinterpret_cast<const uint4*>(bias + 8));
    const bool is_rotated = head < a.q_heads + a.kv_heads;
    float4 turn[4] = {};
    if (is_rotated)
#pragma unroll
      for (int j = 0; j < 4; j++) turn[j] = __ldcg(reinterpret_cast<const float4*>(a.cos_sin + (token * 32 + d) * 2) + j);
    rotate_pair(top.x, bottom.x, top_bias.x, bottom_bias.x, turn[0], is_rotated);
    rotate_pair(top.y, bottom.y, top_bias.y, bottom_bias.y, turn[1], is_rotated);
    rotate_pair(top.z, bottom.z, top_bias.z, bottom_bias.z, turn[2], is_rotated);
    rotate_pair(top.w, bottom.w, top_bias.w, bottom_bias.w, turn[3], is_rotated);
    uint16_t* to;
    if (head < a.q_heads) {
      to = a.q + (static_cast<size_t>(token) * a.q_heads + head) * 64;
    } else {
      if (slot < 0) continue;
      const int kv = head - a.q_heads, value = kv >= a.kv_heads;
      const size_t block = slot / a.block_size;
      to = a.kv_pool + (((block * 2 + value) * a.kv_heads + kv - value * a.kv_heads) * a.block_size + slot % a.block_size) * 64;
    }
    *reinterpret_cast<uint4*>(to + d) = top;
    *reinterpret_cast<uint4*>(to + d + 32) = bottom;
  }
}

// grid (tokens): residual += x + bias, eight columns a thread.
__global__ void __launch_bounds__(512) add_bias_residual(const uint16_t* x, const uint16_t* bias, uint16_t* residual, int columns) {
  const int at = threadIdx.x * 8;
  wait_for_previous_kernel();
  start_next_kernel();
  if (at >= columns) return;
  const uint4 v = load_global_16(x + static_cast<size_t>(blockIdx.x) * columns + at);
  const uint4 w = __ldg(reinterpret_cast<const uint4*>(bias + at));
  uint16_t* row = residual + static_cast<size_t>(blockIdx.x) * columns + at;
  const uint4 r = load_global_16(row);
  auto sum = [](uint32_t a, uint32_t b, uint32_t c) {
    return bf16x2_pack(bf16_low(a) + bf16_low(b) + bf16_low(c), bf16_high(a) + bf16_high(b) + bf16_high(c));
  };
  *reinterpret_cast<uint4*>(row) = make_uint4(sum(v.x, w.x, r.x), sum(v.y, w.y, r.y), sum(v.z, w.z, r.z), sum(v.w, w.w, r.w));
}

int row_threads(int columns) { return (columns / 8 + 31) / 32 * 32; }

}  // namespace

extern "C" int tandem_prepare_step(const void* token_source, void* token_ids, const void* seq_lens, const void* full_table, const void* sliding_table, const void* sliding_start,
                                   const void* inv_freq, void* cos_sin, void* full_slots, void* sliding_slots, void* cu_chunks, int batch,
                                   int full_stride, int sliding_stride, int block_size, int chunk_blocks, float concentration,
                                   void* stream) {
  if (batch > kMaxBatch) return -1;
  const StepArgs a = {static_cast<const int32_t*>(token_source), static_cast<int32_t*>(token_ids), static_cast<const int32_t*>(seq_lens), static_cast<const int32_t*>(full_table),
                      static_cast<const int32_t*>(sliding_table), static_cast<const int32_t*>(sliding_start),
                      static_cast<const float*>(inv_freq), static_cast<float*>(cos_sin), static_cast<int32_t*>(full_slots),
                      static_cast<int32_t*>(sliding_slots), static_cast<int32_t*>(cu_chunks), batch, full_stride, sliding_stride,
                      block_size, chunk_blocks, concentration};
  return launch(prepare_step, dim3(1), 256, 0, stream, a);
}

extern "C" int tandem_combine_norm(const void* token_ids, const void* embedding, const void* pairs, const void* expert_ids,
                                   const void* expert_weights, void* residual, const void* norm_weight, void* normed, int tokens,
                                   int columns, int choices, int first_expert, int experts, int is_sorted, float eps, void* stream) {
  if (columns % 8 || columns > 4096 || choices > kMaxChoices) return -1;
  const CombineArgs a = {static_cast<const int32_t*>(token_ids), static_cast<const uint16_t*>(embedding),
                         static_cast<const uint16_t*>(pairs), static_cast<const int32_t*>(expert_ids),
                         static_cast<const float*>(expert_weights), static_cast<uint16_t*>(residual),
                         static_cast<const uint16_t*>(norm_weight), static_cast<uint16_t*>(normed), columns, choices, first_expert, experts,
                         eps};
  return launch(is_sorted ? combine_norm<true> : combine_norm<false>, dim3(tokens), row_threads(columns), 0, stream, a);
}

extern "C" int tandem_rotate_write(const void* qkv, const void* bias, void* q, void* kv_pool, const void* slots, const void* cos_sin,
                                   int tokens, int q_heads, int kv_heads, int block_size, void* stream) {
  const RotateArgs a = {static_cast<const uint16_t*>(qkv), static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(q),
                        static_cast<uint16_t*>(kv_pool), static_cast<const int32_t*>(slots), static_cast<const float*>(cos_sin), q_heads,
                        kv_heads, block_size};
  const int threads = ((q_heads + 2 * kv_heads) * 4 + 31) / 32 * 32;
  return launch(rotate_write, dim3(tokens), threads < 512 ? threads : 512, 0, stream, a);
}

extern "C" int tandem_add_bias_residual(const void* x, const void* bias, void* residual, int tokens, int columns, void* stream) {
  if (columns % 8 || columns > 4096) return -1;
  return launch(add_bias_residual, dim3(tokens), row_threads(columns), 0, stream, static_cast<const uint16_t*>(x),
                static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(residual), columns);
}
