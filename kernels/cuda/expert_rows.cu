// The tokens of a decode step on their way to the FP8 experts: each token's norm is quantised once and put where its choices go, in order by
// expert and then by token. A block has one token and counts for itself how many of the step's pairs come before its own.
#include "hopper.cuh"

namespace {

constexpr int MAX_PAIRS = 512, MAX_CHOICES = 8, MAX_WARPS = 16;
constexpr int NOWHERE = 0x7FFFFFFF;  // the key of a pair whose expert is not here
constexpr float LARGEST_FP8 = 448.0f, LEAST_SCALE = 0.00390625f;  // 2^-8: 1 / scale is still exact in e4m3

struct RowsArgs {
  const uint16_t* x;          // [tokens, columns] bf16
  const int32_t* expert_ids;  // [tokens, choices] global ids, -1 for none
  unsigned char* q;           // [pairs, out_columns] FP8
  float* scales;              // [pairs]
  int32_t* ends;              // [experts] one past each expert's last row
  int32_t* rows;              // [tokens, choices] where a choice went, -1 for nowhere
  int pairs, choices, first_expert, experts, columns, out_columns, bias_columns;
};

// grid (tokens): eight columns a thread.
__global__ void __launch_bounds__(32 * MAX_WARPS) expert_rows(RowsArgs a) {
  __shared__ int keys[MAX_PAIRS], own[MAX_CHOICES], largest[MAX_WARPS];
  const int token = blockIdx.x, at = threadIdx.x * 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < a.pairs; i += blockDim.x) {
    const int e = __ldcg(a.expert_ids + i) - a.first_expert;
    keys[i] = e >= 0 && e < a.experts ? e * MAX_PAIRS + i : NOWHERE;
  }
  uint4 v = make_uint4(0, 0, 0, 0);
  if (at < a.columns) v = load_global_16(a.x + static_cast<size_t>(token) * a.columns + at);
  // Numbers without their sign order as their bits do.
  auto size = [](uint32_t pair) { return max(static_cast<int>(pair << 16 & 0x7FFF0000u), static_cast<int>(pair & 0x7FFF0000u)); };
  int most = __reduce_max_sync(0xFFFFFFFFu, max(max(size(v.x), size(v.y)), max(size(v.z), size(v.w))));
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  // A warp at a time: this token's choices, then this block's share of the experts' ends.
  for (int task = warp;; task += warps) {
    const bool is_choice = task < a.choices;
    const int expert = blockIdx.x + (task - a.choices) * static_cast<int>(gridDim.x);
    if (!is_choice && expert >= a.experts) break;
    const int key = is_choice ? keys[token * a.choices + task] : (expert + 1) * MAX_PAIRS;
    int before = 0;
    for (int i = lane; i < a.pairs; i += 32) before += keys[i] < key;
    before = __reduce_add_sync(0xFFFFFFFFu, before);
    if (lane != 0) continue;
    if (is_choice) own[task] = a.rows[token * a.choices + task] = key == NOWHERE ? -1 : before;
    else a.ends[expert] = before;
  }
  for (int w = 0; w < warps; w++) most = max(most, largest[w]);
  // The next power of two; of one itself, itself.
  const uint32_t needed = __float_as_uint(max(__uint_as_float(most) * (1.0f / LARGEST_FP8), LEAST_SCALE));
  const float scale = __uint_as_float((needed + 0x7FFFFFu) & 0xFF800000u), inverse = 1.0f / scale;
  auto rounded = [&](uint32_t pair) { return fp8x2_pack(bf16_low(pair) * inverse, bf16_high(pair) * inverse); };
  uint2 word = make_uint2(rounded(v.x) | rounded(v.y) << 16, rounded(v.z) | rounded(v.w) << 16);
  if (at >= a.columns && at < a.columns + a.bias_columns) word.x = word.y = fp8x2_pack(inverse, inverse) * 0x10001u;
  __syncthreads();
  for (int k = 0; k < a.choices; k++) {
    const int row = own[k];
    if (row < 0) continue;
    if (at < a.out_columns) *reinterpret_cast<uint2*>(a.q + static_cast<size_t>(row) * a.out_columns + at) = word;
    if (threadIdx.x == 0) a.scales[row] = scale;
  }
}

}  // namespace

// Returns a CUDA error code, or -1 for a shape that has no instance.
extern "C" int tandem_expert_rows(const void* x, const void* expert_ids, void* q, void* scales, void* ends, void* rows, int tokens, int choices,
                                  int first_expert, int experts, int columns, int out_columns, int bias_columns, void* stream) {
  if (tokens * choices > MAX_PAIRS || choices > MAX_CHOICES || out_columns > 32 * MAX_WARPS * 8 || columns % 8 || bias_columns % 8) return -1;
  const RowsArgs a = {static_cast<const uint16_t*>(x), static_cast<const int32_t*>(expert_ids), static_cast<unsigned char*>(q),
                      static_cast<float*>(scales), static_cast<int32_t*>(ends), static_cast<int32_t*>(rows), tokens * choices, choices,
                      first_expert, experts, columns, out_columns, bias_columns};
  return launch(expert_rows, dim3(tokens), (out_columns / 8 + 31) / 32 * 32, 0, stream, a);
}
