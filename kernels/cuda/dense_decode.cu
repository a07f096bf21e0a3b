// bf16 matrix products for up to 16 tokens, bound by the weights' bytes: QKV with rotary embedding and K/V write, output projection with
// residual, router with norm and top-k. Weights are plain row-major; each warp owns a slice of the columns, a block
// adds its warps' sums in a fixed order. The first weights are asked for before the kernel ahead has finished.
#include <type_traits>

#include "primitives.cuh"

namespace {

constexpr int kMaxChoices = 8;

struct DenseArgs {
  const uint16_t* x;        // [tokens, columns] bf16
  const uint16_t* weights;  // [tiles * 16, columns] bf16
  const uint16_t* bias;     // [tiles * 16] bf16 or null
  int tokens, tiles;
};

struct QkvEpilogue {
  uint16_t* q;              // [tokens, q_heads, head_dim]
  uint16_t* kv_pool;        // [blocks, 2, kv_heads, block_size, head_dim]
  const int32_t* slots;     // [tokens], -1 writes nowhere
  const float* cos_sin;     // [tokens, head_dim / 2, 2]
  int q_heads, kv_heads, block_size;
};
struct ResidualEpilogue {
  const uint16_t* residual;  // null to leave it out
  uint16_t* out;             // [tokens, rows], may be the residual itself
};
struct RouteEpilogue {
  const uint16_t* norm_weight;   // [columns]
  uint16_t* normed;              // [tokens, columns]
  const float* logits_override;  // [tokens, experts] or null
  float* logits;                 // [tokens, experts] scratch
  int32_t* arrived;              // [token tiles], zero before and after
  const int32_t* slots;          // [tokens], -1 for a padded row
  int32_t* expert_ids;           // [tokens, choices]
  float* expert_weights;
  int choices;
  float eps;
};

// Rows r and r + 8 of a tile for one token.
__device__ __forceinline__ void finish(const QkvEpilogue& e, const DenseArgs& a, int tile, int row, int token, float top, float bottom) {
  const int head = tile / 4, d = tile % 4 * 8 + row;  // head_dim 64: a tile holds dimensions d and d + 32
  const int slot = __ldg(e.slots + token);
  if (head < e.q_heads + e.kv_heads) {
    const float2 rotation = *reinterpret_cast<const float2*>(e.cos_sin + (token * 32 + d) * 2);
    const float x1 = top, x2 = bottom;
    top = x1 * rotation.x - x2 * rotation.y;
    bottom = x2 * rotation.x + x1 * rotation.y;
  }
  uint16_t* to;
  if (head < e.q_heads) {
    to = e.q + (static_cast<size_t>(token) * e.q_heads + head) * 64;
  } else {
    if (slot < 0) return;
    const int kv = head - e.q_heads, value = kv >= e.kv_heads;
    const size_t block = slot / e.block_size;
    to = e.kv_pool + (((block * 2 + value) * e.kv_heads + kv - value * e.kv_heads) * e.block_size + slot % e.block_size) * 64;
  }
  to[d] = bf16_from_float(top);
  to[d + 32] = bf16_from_float(bottom);
}
__device__ __forceinline__ void finish(const ResidualEpilogue& e, const DenseArgs& a, int tile, int row, int token, float top, float bottom) {
  const size_t at = static_cast<size_t>(token) * a.tiles * 16 + tile * 16 + row;
  if (e.residual) {
    top += bf16_to_float(__ldcg(e.residual + at));
    bottom += bf16_to_float(__ldcg(e.residual + at + 8));
  }
  e.out[at] = bf16_from_float(top);
  e.out[at + 8] = bf16_from_float(bottom);
}
__device__ __forceinline__ void finish(const RouteEpilogue& e, const DenseArgs& a, int tile, int row, int token, float top, float bottom) {
  float* out = e.logits + static_cast<size_t>(token) * a.tiles * 16 + tile * 16 + row;
  out[0] = top;
  out[8] = bottom;
}

// This warp's slice of the tokens: registers b[nt][j] of lane 4 g + c hold columns 32 j + 8 c .. + 7 of token 8 nt + g.
template <int UNITS, int NT>
__device__ __forceinline__ void load_tokens(uint4 (&b)[NT][UNITS], const uint16_t* x, int tokens, int first_token, int columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int token = first_token + nt * 8 + g;
    const uint16_t* row = x + static_cast<size_t>(token < tokens ? token : 0) * columns + warp * UNITS * 32 + 8 * c;
#pragma unroll
    for (int j = 0; j < UNITS; j++) b[nt][j] = token < tokens ? load_global_16(row + j * 32) : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ float square_sum(uint32_t pair) { return bf16_low(pair) * bf16_low(pair) + bf16_high(pair) * bf16_high(pair); }
__device__ __forceinline__ uint32_t scale_pair(uint32_t x, float scale, uint32_t weight) {
  return bf16x2_pack(bf16_low(x) * scale * bf16_low(weight), bf16_high(x) * scale * bf16_high(weight));
}

// RMSNorm of eight tokens in place. `sums` is [warps][8] of shared memory; `weight` is this warp's slice of the norm's weights.
template <int WARPS, int UNITS>
__device__ __forceinline__ void norm_tokens(uint4 (&b)[1][UNITS], const uint4 (&weight)[UNITS], float* sums, float eps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < UNITS; j++) sum += square_sum(b[0][j].x) + square_sum(b[0][j].y) + square_sum(b[0][j].z) + square_sum(b[0][j].w);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  if (lane % 4 == 0) sums[warp * 8 + g] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += sums[w * 8 + g];
  const float scale = rsqrtf(sum / (WARPS * UNITS * 32) + eps);
#pragma unroll
  for (int j = 0; j < UNITS; j++) {
    b[0][j].x = scale_pair(b[0][j].x, scale, weight[j].x);
    b[0][j].y = scale_pair(b[0][j].y, scale, weight[j].y);
    b[0][j].z = scale_pair(b[0][j].z, scale, weight[j].z);
    b[0][j].w = scale_pair(b[0][j].w, scale, weight[j].w);
  }
}

constexpr int kNone = -2147483647 - 1;  // below every logit
// One warp chooses a token's experts: falling logit, ties to the lower id, NaN as minus infinity; softmax over the chosen.
__device__ __forceinline__ void choose_experts(const float* logits, int experts, int choices, bool padded, int32_t* ids, float* weights) {
  const int lane = threadIdx.x % 32;
  int mine[4];  // integers in the order of the logits
  for (int i = 0; i < 4; i++) {
    const int e = lane + 32 * i;
    const float v = e < experts ? __ldcg(logits + e) : 0.0f;
    mine[i] = e < experts ? order_of(v == v ? v : -INFINITY) : kNone;
  }
  float first = 0.0f, mine_best = 0.0f, total = 0.0f;  // lane k keeps the choice k
  int mine_id = 0;
#pragma unroll
  for (int k = 0; k < kMaxChoices; k++) {
    if (k >= choices) break;
    int own = mine[0], at = 0;
#pragma unroll
    for (int i = 1; i < 4; i++)
      if (mine[i] > own) own = mine[i], at = i;
    const int top = __reduce_max_sync(0xFFFFFFFFu, own);
    const int best_id = __reduce_min_sync(0xFFFFFFFFu, own == top ? lane + 32 * at : 1 << 20);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (best_id == lane + 32 * i) mine[i] = kNone;
    const float best = float_from_order(top);
    if (k == 0) first = best;
    if (lane == k) mine_best = best, mine_id = best_id;
    total += expf(best - first);
  }
  if (lane < choices) {
    ids[lane] = padded ? -1 : mine_id;
    weights[lane] = padded ? 0.0f : expf(mine_best - first) / total;
  }
}

// An item is ROWS of a tile's 16 rows: all of them, or four and the four eight below, which gives small products to more blocks. STAGES is
// the depth of a warp's ring [units of 16 rows].
template <int WARPS, int UNITS, int NT, int STAGES, int ROWS, typename Epilogue>
__global__ void __launch_bounds__(WARPS * 32) dense_gemm(DenseArgs a, Epilogue epilogue) {
  constexpr bool kRoute = std::is_same<Epilogue, RouteEpilogue>::value;
  constexpr int kColumns = WARPS * UNITS * 32;
  DYNAMIC_SHARED(shared);
  constexpr int kParts = 16 / ROWS, kSlots = STAGES * kParts, kSlotBytes = ROWS * 64;
  constexpr int kTurns = kSlots > UNITS ? kSlots / UNITS : 1;  // items until the ring's slots repeat
  static_assert(kSlots % UNITS == 0 || UNITS % kSlots == 0, "the ring's slots are known where the loops are unrolled");
  float* partial = reinterpret_cast<float*>(shared + WARPS * kSlots * kSlotBytes);  // two of [WARPS][NT][4][32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  unsigned char* ring = shared + warp * kSlots * kSlotBytes;

  // This lane asks for columns 8 c .. 8 c + 7 of one or two rows, unit by unit.
  const int items = a.tiles * kParts;
  auto place_of = [&](int item) {
    const int row = ROWS == 16 ? g : item % 2 * 4 + g % 4 + g / 4 * 8;
    return a.weights + (static_cast<size_t>(item / kParts) * 16 + row) * kColumns + warp * UNITS * 32 + 8 * c;
  };
  const uint16_t* next = place_of(blockIdx.x);
  int ask_item = blockIdx.x, ask_unit = 0;
  auto ask = [&](int slot) {
    if (ask_item < items) {
      copy_async_16(ring + slot * kSlotBytes + lane * 16, next + ask_unit * 32);
      if constexpr (ROWS == 16) copy_async_16(ring + slot * kSlotBytes + 512 + lane * 16, next + ask_unit * 32 + 8 * kColumns);
    }
    copy_async_commit();
    if (++ask_unit == UNITS) {
      ask_unit = 0;
      ask_item += gridDim.x;
      next = place_of(ask_item);
    }
  };
#pragma unroll
  for (int i = 0; i < kSlots; i++) ask(i);

  uint4 b[NT][UNITS];
  const int first_token = kRoute ? blockIdx.y * 8 : 0;
  if constexpr (kRoute) {
    uint4 norm[UNITS];
#pragma unroll
    for (int j = 0; j < UNITS; j++) norm[j] = __ldg(reinterpret_cast<const uint4*>(epilogue.norm_weight + warp * UNITS * 32 + j * 32 + 8 * c));
    wait_for_previous_kernel();
    start_next_kernel();
    load_tokens(b, a.x, a.tokens, first_token, kColumns);
    norm_tokens<WARPS, UNITS>(b, norm, partial, epilogue.eps);
    if (blockIdx.x == 0 && first_token + g < a.tokens)
#pragma unroll
      for (int j = 0; j < UNITS; j++)
        *reinterpret_cast<uint4*>(epilogue.normed + static_cast<size_t>(first_token + g) * kColumns + warp * UNITS * 32 + j * 32 + 8 * c) = b[0][j];
    __syncthreads();
  } else {
    wait_for_previous_kernel();
    start_next_kernel();
    load_tokens(b, a.x, a.tokens, first_token, kColumns);
  }

  int phase = 0, turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    float acc[NT][4] = {};
#pragma unroll
    for (int j = 0; j < UNITS; j++) {
      copy_async_wait<kSlots - 1>();
      if constexpr (ROWS == 8) __syncwarp();  // two lanes read each piece: rows 4 .. 7 and 12 .. 15 repeat the others, and nobody wants them
      const int slot = (turn * UNITS + j) % kSlots;
      const unsigned char* slice = ring + slot * kSlotBytes + lane % (2 * ROWS) * 16;
      const uint4 top = *reinterpret_cast<const uint4*>(slice);
      const uint4 bottom = *reinterpret_cast<const uint4*>(slice + kSlotBytes / 2);
#pragma unroll
      for (int nt = 0; nt < NT; nt++) {
        mma_bf16(acc[nt], top.x, bottom.x, top.y, bottom.y, b[nt][j].x, b[nt][j].y);
        mma_bf16(acc[nt], top.z, bottom.z, top.w, bottom.w, b[nt][j].z, b[nt][j].w);
      }
      if constexpr (ROWS == 8) __syncwarp();
      ask(slot);
    }
    if (++turn == kTurns) turn = 0;
    float* mine = partial + phase * WARPS * NT * 128;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int i = 0; i < 4; i++) mine[((warp * NT + nt) * 4 + i) * 32 + lane] = acc[nt][i];
    __syncthreads();
    for (int i = threadIdx.x; i < NT * ROWS * 4; i += WARPS * 32) {
      const int g_of = i % (ROWS / 2), n = i / (ROWS / 2), tile = item / kParts, row = item % kParts * 4 + g_of;
      if (first_token + n >= a.tokens) continue;
      const float* at = mine + (n / 8 * 4 + (n & 1)) * 32 + 4 * g_of + n % 8 / 2;
      float top = 0.0f, bottom = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        top += at[w * NT * 128];
        bottom += at[w * NT * 128 + 64];
      }
      if (a.bias) {
        top += bf16_to_float(__ldg(a.bias + tile * 16 + row));
        bottom += bf16_to_float(__ldg(a.bias + tile * 16 + row + 8));
      }
      finish(epilogue, a, tile, row, first_token + n, top, bottom);
    }
    phase ^= 1;
  }

  if constexpr (kRoute) {  // the block that comes last has all logits of its eight tokens
    __threadfence();
    __syncthreads();
    int32_t* last = reinterpret_cast<int32_t*>(shared);
    if (threadIdx.x == 0) {
      const int before = atomicAdd(epilogue.arrived + blockIdx.y, 1);
      if (before == static_cast<int>(gridDim.x) - 1) epilogue.arrived[blockIdx.y] = 0;
      *last = before == static_cast<int>(gridDim.x) - 1;
    }
    __syncthreads();
    if (!*last) return;
    __threadfence();
    for (int token = first_token + warp; token < a.tokens && token < first_token + 8; token += WARPS) {
      const size_t at = static_cast<size_t>(token) * a.tiles * 16;
      choose_experts((epilogue.logits_override ? epilogue.logits_override : epilogue.logits) + at, a.tiles * 16, epilogue.choices,
                     __ldg(epilogue.slots + token) < 0, epilogue.expert_ids + token * epilogue.choices,
                     epilogue.expert_weights + token * epilogue.choices);
    }
  }
}

template <int WARPS, int UNITS, int NT, int STAGES, int ROWS, typename Epilogue>
int launch_one(const DenseArgs& a, const Epilogue& e, dim3 grid, void* stream) {
  constexpr int kShared = WARPS * STAGES * 1024 + 2 * WARPS * NT * 512;
  return launch(dense_gemm<WARPS, UNITS, NT, STAGES, ROWS, Epilogue>, grid, WARPS * 32, kShared, stream, a, e);
}

// Columns are warps x units x 32. 2880: hidden; 4096 / 2048 / 1024 / 512: heads of one, two, four, eight ranks; 256: the tiny model.
template <int NT, int ROWS, typename Epilogue>
int launch_columns(const DenseArgs& a, const Epilogue& e, int columns, dim3 grid, void* stream) {
  if constexpr (std::is_same<Epilogue, ResidualEpilogue>::value) {
    switch (columns) {
#ifdef TANDEM_EMULATE
      case 512: return launch_one<4, 4, NT, 2, ROWS>(a, e, grid, stream);
#else
      case 4096: return launch_one<16, 8, NT, 4, ROWS>(a, e, grid, stream);
      case 2048: return launch_one<16, 4, NT, 4, ROWS>(a, e, grid, stream);
      case 1024: return launch_one<8, 4, NT, 4, ROWS>(a, e, grid, stream);
      case 512: return launch_one<8, 2, NT, 2, ROWS>(a, e, grid, stream);
#endif
    }
  }
  switch (columns) {
    case 256: return launch_one<4, 2, NT, 2, ROWS>(a, e, grid, stream);
#ifndef TANDEM_EMULATE
    case 2880: return launch_one<10, 9, NT, 9, ROWS>(a, e, grid, stream);
#endif
    default: return -1;
  }
}

// Rows of an item for up to eight tokens, as measured on one H200 with items of 16 rows / of 8: QKV 9.0 / 9.7 us at one token, 10.2 / 11.4
// at 8; projection 8.8 / 8.7 and 10.0 / 9.5; router 6.1 / 5.0 and 6.6 / 5.5 (together with `choose_experts`). At 16 tokens both lose.
template <int ROWS, typename Epilogue>
int launch_dense(const DenseArgs& a, const Epilogue& e, int columns, int blocks, void* stream) {
  const int items = a.tiles * (16 / ROWS);
  if (a.tokens <= 8) return launch_columns<1, ROWS>(a, e, columns, dim3(blocks < items ? blocks : items), stream);
  if (a.tokens <= 16) return launch_columns<2, 16>(a, e, columns, dim3(blocks < a.tiles ? blocks : a.tiles), stream);
  return -1;
}
DenseArgs dense_args(const void* x, const void* weights, const void* bias, int tokens, int tiles) {
  return {static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weights), static_cast<const uint16_t*>(bias), tokens, tiles};
}

}  // namespace

extern "C" int tandem_qkv(const void* x, const void* weights, const void* bias, void* q, void* kv_pool, const void* slots,
                          const void* cos_sin, int tokens, int columns, int tiles, int q_heads, int kv_heads, int block_size, int blocks,
                          void* stream) {
  const QkvEpilogue e = {static_cast<uint16_t*>(q), static_cast<uint16_t*>(kv_pool), static_cast<const int32_t*>(slots),
                         static_cast<const float*>(cos_sin), q_heads, kv_heads, block_size};
  return launch_dense<16>(dense_args(x, weights, bias, tokens, tiles), e, columns, blocks, stream);
}

extern "C" int tandem_projection(const void* x, const void* weights, const void* bias, const void* residual, void* out, int tokens,
                                 int columns, int tiles, int blocks, void* stream) {
  const ResidualEpilogue e = {static_cast<const uint16_t*>(residual), static_cast<uint16_t*>(out)};
  return launch_dense<8>(dense_args(x, weights, bias, tokens, tiles), e, columns, blocks, stream);
}

extern "C" int tandem_route(const void* x, const void* weights, const void* bias, const void* norm_weight, void* normed,
                            const void* logits_override, void* logits, void* arrived, const void* slots, void* expert_ids,
                            void* expert_weights, int tokens, int columns, int tiles, int choices, float eps, void* stream) {
  if (tiles > 8 || choices > kMaxChoices) return -1;
  const RouteEpilogue e = {static_cast<const uint16_t*>(norm_weight), static_cast<uint16_t*>(normed),
                           static_cast<const float*>(logits_override), static_cast<float*>(logits), static_cast<int32_t*>(arrived),
                           static_cast<const int32_t*>(slots), static_cast<int32_t*>(expert_ids), static_cast<float*>(expert_weights),
                           choices, eps};
  const DenseArgs a = dense_args(x, weights, bias, tokens, tiles);
  return launch_columns<1, 8>(a, e, columns, dim3(2 * tiles, (tokens + 7) / 8), stream);
}
