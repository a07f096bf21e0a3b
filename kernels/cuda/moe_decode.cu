// MXFP4 expert products for few tokens: weights are the 16-row operand and stream from memory once, tokens the 8-column operand and stay
// in registers. Each warp owns a slice of the columns; a block walks a contiguous range of (expert, 16-row tile) and adds its warps' sums
// in a fixed order, so that a token's result does not depend on the other tokens. Weight layout: `kernels/moe_decode.py`.
#include "primitives.cuh"

namespace {

constexpr int kUnitBytes = 272;  // 16 rows x 32 columns: 256 bytes of codes, 16 of scales
constexpr int kMaxExperts = 128;
constexpr int kMaxPairs = 512;

struct MoeArgs {
  const uint16_t* x;          // [rows, columns] bf16
  const uint8_t* weights;     // [experts, tiles, columns / 32, 272]
  const uint16_t* bias;       // [experts, tiles * 16] bf16, the checkpoint's order
  const int32_t* expert_ids;  // [pairs], global ids, -1 for none
  uint16_t* out;              // [pairs, out_columns] bf16
  int pairs, pairs_per_row, first_expert, experts, tiles, experts_known_early;
  float alpha, limit;
};

// The (expert, tokens) groups of this step, the same in every block.
struct Groups {
  int16_t order[kMaxPairs];                 // pair ids, by expert
  int16_t begin[kMaxExperts + kMaxPairs];   // of a group, into order
  int16_t count[kMaxExperts + kMaxPairs];
  int16_t expert[kMaxExperts + kMaxPairs];
  int16_t pair_expert[kMaxPairs];
  int16_t per_expert[kMaxExperts], first_pair[kMaxExperts], first_group[kMaxExperts];
  int total;
};

template <int MAX_TOKENS>
__device__ __forceinline__ void build_groups(Groups& s, const MoeArgs& a) {
  const int t = threadIdx.x;
  for (int i = t; i < a.pairs; i += blockDim.x) {
    const int e = __ldcg(a.expert_ids + i);
    s.pair_expert[i] = (e >= a.first_expert && e < a.first_expert + a.experts) ? e - a.first_expert : -1;
  }
  __syncthreads();
  if (t < a.experts) {
    int n = 0;
    for (int i = 0; i < a.pairs; i++) n += s.pair_expert[i] == t;
    s.per_expert[t] = n;
  }
  __syncthreads();
  if (t < 32) {
    constexpr int kEach = kMaxExperts / 32;
    int pairs = 0, groups = 0;
    for (int i = 0; i < kEach; i++) {
      const int e = t * kEach + i;
      const int n = e < a.experts ? s.per_expert[e] : 0;
      pairs += n;
      groups += (n + MAX_TOKENS - 1) / MAX_TOKENS;
    }
    int pairs_end = pairs, groups_end = groups;
    for (int step = 1; step < 32; step <<= 1) {
      const int p = __shfl_up_sync(0xFFFFFFFFu, pairs_end, step), g = __shfl_up_sync(0xFFFFFFFFu, groups_end, step);
      if (t >= step) pairs_end += p, groups_end += g;
    }
    int first_pair = pairs_end - pairs, first_group = groups_end - groups;
    for (int i = 0; i < kEach; i++) {
      const int e = t * kEach + i;
      if (e >= a.experts) break;
      s.first_pair[e] = first_pair;
      s.first_group[e] = first_group;
      first_pair += s.per_expert[e];
      first_group += (s.per_expert[e] + MAX_TOKENS - 1) / MAX_TOKENS;
    }
    if (t == 31) s.total = groups_end;
  }
  __syncthreads();
  if (t < a.experts) {
    int place = s.first_pair[t];
    const int n = s.per_expert[t];
    for (int done = 0, g = s.first_group[t]; done < n; done += MAX_TOKENS, g++) {
      s.begin[g] = place + done;
      s.count[g] = min(n - done, MAX_TOKENS);
      s.expert[g] = t;
    }
    if (n > 0)
      for (int i = 0; i < a.pairs; i++)
        if (s.pair_expert[i] == t) s.order[place++] = i;
  }
  __syncthreads();
}

// Eight 4-bit weights of one row to four bf16 pairs. The stored bits lie so that a rotation puts sign, exponent and mantissa where bf16
// has them; the multiplication by 2^126 times the group's scale supplies the exponent bias and makes 0.5, a subnormal here, right.
__device__ __forceinline__ void decode_fp4(uint32_t q, uint32_t scale, uint32_t (&w)[4]) {
  constexpr uint32_t kMask = 0x81C081C0u;
  w[0] = bf16x2_mul(q & kMask, scale);
  w[1] = bf16x2_mul(rotate_left(q, 13) & kMask, scale);
  w[2] = bf16x2_mul(rotate_left(q, 10) & kMask, scale);
  w[3] = bf16x2_mul(((q & 0x001B001Bu) * 0x1084u) & kMask, scale);
}

template <int WARPS, int UNITS, int STAGES>
struct WeightStream {
  static constexpr int kSlice = UNITS * kUnitBytes;
  unsigned char* ring;  // this warp's
  uint64_t* full;
  const uint8_t* weights;
  const Groups* groups;
  int tiles, group, tile, left;  // next tile to ask for, and how many are left
  int slot_in, slot_out, parity;

  __device__ __forceinline__ void ask() {
    if (left == 0) return;
    left--;
    if (threadIdx.x % 32 == 0) {
      const size_t at = static_cast<size_t>(groups->expert[group]) * tiles + tile;
      copy_bulk(ring + slot_in * kSlice, weights + (at * WARPS + threadIdx.x / 32) * kSlice, kSlice, full + slot_in);
    }
    if (++slot_in == STAGES) slot_in = 0;
    if (++tile == tiles) tile = 0, group++;
  }
  __device__ __forceinline__ const unsigned char* wait() {
    barrier_wait(full + slot_out, parity);
    return ring + slot_out * kSlice;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (++slot_out == STAGES) slot_out = 0, parity ^= 1;
    ask();
  }
};

template <int WARPS, int UNITS, int MT, int NT, int STAGES, bool GATE_UP>
__device__ __forceinline__ void run_group(const MoeArgs& a, const Groups& s, WeightStream<WARPS, UNITS, STAGES>& stream, float* partial,
                                          int& phase, int group, int tile_begin, int tile_end, int out_columns) {
  constexpr int kColumns = WARPS * UNITS * 32;
  constexpr int kPartial = WARPS * MT * NT * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
  const int count = s.count[group], expert = s.expert[group];
  const int16_t* order = s.order + s.begin[group];

  uint4 b[NT][UNITS];
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int n = nt * 8 + g;
    const uint16_t* row = a.x + static_cast<size_t>(n < count ? order[n] / a.pairs_per_row : 0) * kColumns + warp * UNITS * 32 + 8 * c;
#pragma unroll
    for (int j = 0; j < UNITS; j++) b[nt][j] = n < count ? load_global_16(row + j * 32) : make_uint4(0, 0, 0, 0);
  }
  for (int tile = tile_begin; tile < tile_end; tile += MT) {
    float acc[MT][NT][4] = {};
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      if (MT > 1 && tile + mt >= tile_end) break;
      const unsigned char* slice = stream.wait();
#pragma unroll
      for (int j = 0; j < UNITS; j++) {
        const uint2 codes = *reinterpret_cast<const uint2*>(slice + j * kUnitBytes + lane * 8);
        const uint32_t scales = *reinterpret_cast<const uint16_t*>(slice + j * kUnitBytes + 256 + g * 2);
        uint32_t top[4], bottom[4];  // rows g and g + 8
        decode_fp4(codes.x, (scales & 0xFFu) * 0x00800080u, top);
        decode_fp4(codes.y, (scales >> 8) * 0x00800080u, bottom);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
          mma_bf16(acc[mt][nt], top[0], bottom[0], top[1], bottom[1], b[nt][j].x, b[nt][j].y);
          mma_bf16(acc[mt][nt], top[2], bottom[2], top[3], bottom[3], b[nt][j].z, b[nt][j].w);
        }
      }
      stream.release();
    }
    float* mine = partial + phase * kPartial;
#pragma unroll
    for (int mt = 0; mt < MT; mt++)
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) mine[(((warp * MT + mt) * NT + nt) * 4 + i) * 32 + lane] = acc[mt][nt][i];
    __syncthreads();
    for (int i = threadIdx.x; i < MT * NT * 64; i += WARPS * 32) {
      const int row = i % 8, n = (i / 8) % (NT * 8), mt = i / (NT * 64);
      if (n >= count || tile + mt >= tile_end) continue;
      const float* at = mine + ((mt * NT + n / 8) * 4 + (n & 1)) * 32 + 4 * row + (n % 8) / 2;
      float top = 0.0f, bottom = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        top += at[w * MT * NT * 128];
        bottom += at[w * MT * NT * 128 + 64];
      }
      uint16_t* out = a.out + static_cast<size_t>(order[n]) * out_columns;
      if (GATE_UP) {
        const int column = (tile + mt) * 8 + row;
        const uint16_t* bias = a.bias + (static_cast<size_t>(expert) * out_columns + column) * 2;
        float gate = top + bf16_to_float(__ldg(bias)), up = bottom + bf16_to_float(__ldg(bias + 1));
        gate = gate > a.limit ? a.limit : gate;  // comparisons, not fminf: NaN must stay NaN
        up = up > a.limit ? a.limit : (up < -a.limit ? -a.limit : up);
        out[column] = bf16_from_float((up + 1.0f) * gate / (1.0f + __expf(-a.alpha * gate)));
      } else {
        const int column = (tile + mt) * 16 + row;
        const uint16_t* bias = a.bias + static_cast<size_t>(expert) * out_columns + column;
        out[column] = bf16_from_float(top + bf16_to_float(__ldg(bias)));
        out[column + 8] = bf16_from_float(bottom + bf16_to_float(__ldg(bias + 8)));
      }
    }
    phase ^= 1;
  }
}

template <int WARPS, int UNITS, int MT, int NT_MAX, int STAGES, bool GATE_UP>
__global__ void __launch_bounds__(WARPS * 32, 1) moe_gemm(MoeArgs a) {
  DYNAMIC_SHARED(shared);
  using Stream = WeightStream<WARPS, UNITS, STAGES>;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared);
  unsigned char* rings = shared + (WARPS * STAGES * 8 + 127) / 128 * 128;
  float* partial = reinterpret_cast<float*>(rings + WARPS * STAGES * Stream::kSlice);
  Groups& groups = *reinterpret_cast<Groups*>(partial + 2 * WARPS * MT * NT_MAX * 128);
  const int warp = threadIdx.x / 32;

  if (threadIdx.x < WARPS * STAGES) barrier_init(full + threadIdx.x, 1);
  barrier_init_fence();
  // The second product's experts were known before its predecessor ran: its first weights can be on their way while that one works.
  if (!a.experts_known_early) wait_for_previous_kernel();
  build_groups<NT_MAX * 8>(groups, a);

  const int tiles = groups.total * a.tiles, blocks = gridDim.x;
  const int first = static_cast<int>(static_cast<long long>(tiles) * blockIdx.x / blocks);
  const int last = static_cast<int>(static_cast<long long>(tiles) * (blockIdx.x + 1) / blocks);
  Stream stream = {rings + warp * STAGES * Stream::kSlice, full + warp * STAGES, a.weights, &groups, a.tiles, first / a.tiles,
                   first % a.tiles, last - first, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < STAGES; i++) stream.ask();
  if (a.experts_known_early) wait_for_previous_kernel();
  start_next_kernel();

  const int out_columns = GATE_UP ? a.tiles * 8 : a.tiles * 16;
  int phase = 0;
  for (int at = first; at < last;) {
    const int group = at / a.tiles, begin = at % a.tiles;
    const int end = min(a.tiles, begin + last - at);
    const int count = groups.count[group];
    if (NT_MAX == 1 || count <= 8)
      run_group<WARPS, UNITS, MT, 1, STAGES, GATE_UP>(a, groups, stream, partial, phase, group, begin, end, out_columns);
    else if (NT_MAX == 2 || count <= 16)
      run_group<WARPS, UNITS, MT, NT_MAX < 2 ? 1 : 2, STAGES, GATE_UP>(a, groups, stream, partial, phase, group, begin, end, out_columns);
    else
      run_group<WARPS, UNITS, MT, NT_MAX < 3 ? 1 : 3, STAGES, GATE_UP>(a, groups, stream, partial, phase, group, begin, end, out_columns);
    at += end - begin;
  }
}

template <int WARPS, int UNITS, int MT, int NT_MAX, int STAGES>
int launch_moe(const MoeArgs& a, bool gate_up, int blocks, void* stream) {
  constexpr int kShared = (WARPS * STAGES * 8 + 127) / 128 * 128 + WARPS * STAGES * UNITS * kUnitBytes +
                          2 * WARPS * MT * NT_MAX * 512 + static_cast<int>(sizeof(Groups));
  if (gate_up) return launch(moe_gemm<WARPS, UNITS, MT, NT_MAX, STAGES, true>, dim3(blocks), WARPS * 32, kShared, stream, a);
  return launch(moe_gemm<WARPS, UNITS, MT, NT_MAX, STAGES, false>, dim3(blocks), WARPS * 32, kShared, stream, a);
}

}  // namespace

// Returns a CUDA error code, or -1 for a shape that has no instance. `variant` picks tiles per barrier and ring depth.
extern "C" int tandem_moe_gemm(const void* x, const void* weights, const void* bias, const void* expert_ids, void* out, int pairs,
                               int pairs_per_row, int columns, int tiles, int first_expert, int experts, int gate_up,
                               int experts_known_early, int max_tokens, int variant, float alpha, float limit, int blocks, void* stream) {
  const MoeArgs a = {static_cast<const uint16_t*>(x), static_cast<const uint8_t*>(weights), static_cast<const uint16_t*>(bias),
                     static_cast<const int32_t*>(expert_ids), static_cast<uint16_t*>(out), pairs, pairs_per_row, first_expert, experts,
                     tiles, experts_known_early, alpha, limit};
  if (pairs > kMaxPairs || experts > kMaxExperts) return -1;
#ifdef TANDEM_EMULATE
  if (columns == 256 && max_tokens <= 8) return launch_moe<4, 2, 2, 1, 4>(a, gate_up, blocks, stream);
  if (columns == 256) return launch_moe<4, 2, 1, 3, 3>(a, gate_up, blocks, stream);
  if (columns == 192 && max_tokens <= 8) return launch_moe<3, 2, 1, 1, 2>(a, gate_up, blocks, stream);
  if (columns == 192) return launch_moe<3, 2, 2, 2, 3>(a, gate_up, blocks, stream);
  return -1;
#else
  if (columns != 2880) return -1;
  if (max_tokens <= 8) {
    switch (variant) {
      case 0: return launch_moe<10, 9, 1, 1, 4>(a, gate_up, blocks, stream);
      case 1: return launch_moe<10, 9, 2, 1, 3>(a, gate_up, blocks, stream);
      case 2: return launch_moe<10, 9, 2, 1, 7>(a, gate_up, blocks, stream);
      case 3: return launch_moe<15, 6, 2, 1, 4>(a, gate_up, blocks, stream);
      default: return -1;
    }
  }
  switch (variant) {
    case 0: return launch_moe<10, 9, 1, 3, 4>(a, gate_up, blocks, stream);
    case 1: return launch_moe<10, 9, 2, 2, 4>(a, gate_up, blocks, stream);
    case 2: return launch_moe<10, 9, 1, 2, 4>(a, gate_up, blocks, stream);
    case 3: return launch_moe<15, 6, 1, 2, 5>(a, gate_up, blocks, stream);
    default: return -1;
  }
#endif
}
