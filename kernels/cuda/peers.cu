// Where the ranks of a group meet inside a step, over memory that each of them has mapped of all others: sums of activations with residual
// and RMSNorm, of prompts too; in decode steps logits to rank 0 and tokens to all.
//
// A rank writes its part into the memory of every other one, then raises a flag there (release at system scope); each reads its own memory
// after its flags are up (acquire). Flags carry a count of meetings that never goes back, so nothing is reset. Parts lie in two halves that
// meetings take in turn: whoever writes into a half for the second time has seen all flags of the meeting between, which a rank raises only
// when its launch before, the last reader of that half, has ended. So one barrier per meeting is enough.
//
// A wait ends at a deadline or as soon as another block has given up; it then leaves the missing rank + 1 in `status`, which ends all later
// waits at once, and results are garbage. The host looks at `status` after each step.
#include "primitives.cuh"

namespace {

constexpr int kMaxRanks = 8, kMaxRows = 128;  // rows: of a decode step; sums take as many as there is room for
constexpr int kPollsBetweenLooks = 32;

// Offsets in bytes into every rank's memory; flags are [rows][8] counts, one for each writer.
struct Meeting {
  unsigned long long flags, parts;
  unsigned long long bases[kMaxRanks];  // where each rank's memory is in this process
  uint32_t* counts;                     // [rows] meetings so far, of this rank alone
  int32_t* status;                      // 0, or the missing rank + 1
  long long timeout_ns;
  int rank, ranks;
};

__device__ __forceinline__ unsigned char* memory_of(const Meeting& m, int rank) {
  return reinterpret_cast<unsigned char*>(m.bases[rank]);
}
__device__ __forceinline__ uint32_t* flag_at(const Meeting& m, int owner, int row, int writer) {
  return reinterpret_cast<uint32_t*>(memory_of(m, owner) + m.flags) + row * kMaxRanks + writer;
}

__device__ void wait_for_rank(const Meeting& m, int row, int writer, uint32_t count) {
  const uint32_t* flag = flag_at(m, m.rank, row, writer);
  long long since = -1;
  for (int polls = 0; static_cast<int32_t>(load_acquire_system(flag) - count) < 0; polls++) {
    if ((polls + 1) % kPollsBetweenLooks != 0) continue;
    if (load_relaxed(m.status) != 0) return;
    const long long now = time_ns();
    if (since < 0) since = now;
    if (now - since > m.timeout_ns) {
      atomicCAS(m.status, 0, writer + 1);
      return;
    }
    let_others_run();
  }
}

// The whole block: what its threads have written to the others' memory is theirs to read, and what they wrote is ours.
__device__ __forceinline__ void meet(const Meeting& m, int row, uint32_t count) {
  __syncthreads();
  const int other = threadIdx.x;
  if (other < m.ranks && other != m.rank) {
    store_release_system(flag_at(m, other, row, m.rank), count);
    wait_for_rank(m, row, other, count);
  }
  __syncthreads();
}

struct SumArgs {
  Meeting meeting;
  const uint16_t* x;            // [tokens, columns] this rank's part, or null if it is made of `pairs`
  const uint16_t* pairs;        // [tokens, choices, columns] expert outputs; sorted: [rows, columns]
  const int32_t* expert_ids;    // [tokens, choices]; sorted: rows of `pairs`, -1 for none
  const float* expert_weights;  // [tokens, choices]
  const uint16_t* bias;         // [columns] or null
  uint16_t* residual;           // [tokens, columns] in and out
  const uint16_t* norm_weight;  // [columns] or null: no norm
  uint16_t* normed;             // [tokens, columns]
  int room, columns, choices, first_expert, experts;  // room: rows that a half holds
  float eps;
};

__device__ __forceinline__ void add_8(float (&x)[8], const uint4& v, float weight) {
  x[0] += bf16_low(v.x) * weight, x[1] += bf16_high(v.x) * weight, x[2] += bf16_low(v.y) * weight, x[3] += bf16_high(v.y) * weight;
  x[4] += bf16_low(v.z) * weight, x[5] += bf16_high(v.z) * weight, x[6] += bf16_low(v.w) * weight, x[7] += bf16_high(v.w) * weight;
}
__device__ __forceinline__ uint4 pack_8(const float (&x)[8]) {
  return make_uint4(bf16x2_pack(x[0], x[1]), bf16x2_pack(x[2], x[3]), bf16x2_pack(x[4], x[5]), bf16x2_pack(x[6], x[7]));
}
__device__ __forceinline__ float square_sum(uint32_t v) { return bf16_low(v) * bf16_low(v) + bf16_high(v) * bf16_high(v); }

// grid (tokens): eight columns a thread. residual += bias + the ranks' parts, added in fp32 in rank order, so that all ranks get the same
// bits; normed = RMSNorm of it. Parts travel as bf16 [2 halves][rows][ranks][columns].
template <int RANKS, bool SORTED>
__global__ void __launch_bounds__(512) sum_rows(const __grid_constant__ SumArgs a) {
  __shared__ float sums[16];
  const Meeting& m = a.meeting;
  const int row = blockIdx.x, at = threadIdx.x * 8;
  const bool active = at < a.columns;
  uint4 norm = make_uint4(0, 0, 0, 0), bias = norm;
  if (active && a.norm_weight) norm = __ldg(reinterpret_cast<const uint4*>(a.norm_weight + at));
  if (active && a.bias) bias = __ldg(reinterpret_cast<const uint4*>(a.bias + at));
  wait_for_previous_kernel();
  start_next_kernel();
  const uint32_t count = __ldcg(m.counts + row) + 1;
  const size_t half = (static_cast<size_t>(count & 1) * a.room + row) * RANKS;
  auto part_of = [&](int owner, int writer) {
    return reinterpret_cast<uint4*>(memory_of(m, owner) + m.parts + ((half + writer) * a.columns + at) * sizeof(uint16_t));
  };
  float x[8] = {};
  uint4 own = make_uint4(0, 0, 0, 0), before = own;
  if (active) {
    if (a.x) {
      own = load_global_16(a.x + static_cast<size_t>(row) * a.columns + at);
    } else {
#pragma unroll 4
      for (int k = 0; k < a.choices; k++) {
        const int e = __ldcg(a.expert_ids + row * a.choices + k);
        if (SORTED ? e >= 0 : e >= a.first_expert && e < a.first_expert + a.experts) {
          const size_t from = SORTED ? e : static_cast<size_t>(row) * a.choices + k;
          add_8(x, load_global_16(a.pairs + from * a.columns + at), __ldcg(a.expert_weights + row * a.choices + k));
        }
      }
      own = pack_8(x);
    }
#pragma unroll
    for (int i = 1; i < RANKS; i++) {
      const int other = (m.rank + i) % RANKS;  // not all ranks to the same one at a time
      *part_of(other, m.rank) = own;
    }
    before = load_global_16(a.residual + static_cast<size_t>(row) * a.columns + at);
  }
  meet(m, row, count);
  uint4 sum = make_uint4(0, 0, 0, 0);
  if (active) {
    uint4 parts[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) parts[r] = r == m.rank ? own : load_global_16(part_of(m.rank, r));
    float total[8] = {};
#pragma unroll
    for (int r = 0; r < RANKS; r++) add_8(total, parts[r], 1.0f);
    add_8(total, bias, 1.0f);
    add_8(total, before, 1.0f);
    sum = pack_8(total);
    *reinterpret_cast<uint4*>(a.residual + static_cast<size_t>(row) * a.columns + at) = sum;
  }
  if (threadIdx.x == 0) m.counts[row] = count;
  if (!a.norm_weight) return;
  float squares = warp_sum(square_sum(sum.x) + square_sum(sum.y) + square_sum(sum.z) + square_sum(sum.w));
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; w++) squares += sums[w];
  const float scale = rsqrtf(squares / a.columns + a.eps);
  auto scaled = [&](uint32_t v, uint32_t w) { return bf16x2_pack(bf16_low(v) * scale * bf16_low(w), bf16_high(v) * scale * bf16_high(w)); };
  if (active)
    *reinterpret_cast<uint4*>(a.normed + static_cast<size_t>(row) * a.columns + at) =
        make_uint4(scaled(sum.x, norm.x), scaled(sum.y, norm.y), scaled(sum.z, norm.z), scaled(sum.w, norm.w));
}

struct BestArgs {
  Meeting meeting;
  const float* best;   // [rows, parts]: the first is the row's largest logit among this rank's words
  const int32_t* seq_lens;
  int32_t* tokens;     // [rows] in: the word of that logit, counted from this rank's first, or negative; out: the id of the best of all
  int rows, parts, first_word;
};

// One block: every rank's best word of each row to all ranks, as [2 halves][ranks][rows] of (logit, id). Ties go to the lower id.
__global__ void __launch_bounds__(kMaxRows) meet_best(const __grid_constant__ BestArgs a) {
  const Meeting& m = a.meeting;
  const int row = threadIdx.x;
  wait_for_previous_kernel();
  start_next_kernel();
  const uint32_t count = __ldcg(m.counts) + 1;
  auto place = [&](int owner, int writer) {
    return reinterpret_cast<uint2*>(memory_of(m, owner) + m.parts) + ((count & 1) * kMaxRanks + writer) * kMaxRows + row;
  };
  uint2 own = make_uint2(0, 0);
  if (row < a.rows) {
    const int word = __ldcg(a.tokens + row);
    own = make_uint2(__float_as_uint(__ldcg(a.best + static_cast<size_t>(row) * a.parts)), static_cast<uint32_t>(word < 0 ? word : word + a.first_word));
    for (int i = 1; i < m.ranks; i++) *place((m.rank + i) % m.ranks, m.rank) = own;
  }
  meet(m, 0, count);
  if (row < a.rows) {
    float value = 0.0f;
    int token = 0;
    for (int r = 0; r < m.ranks; r++) {
      uint2 part = own;
      if (r != m.rank) part = __ldcg(place(m.rank, r));
      const int id = static_cast<int>(part.y);
      const float logit = __uint_as_float(part.x);
      if (r == 0 || (token >= 0 && (id < 0 || logit > value))) value = logit, token = id;
    }
    a.tokens[row] = __ldg(a.seq_lens + row) == 0 ? 0 : token;
  }
  __syncthreads();
  if (threadIdx.x == 0) *m.counts = count;
}

struct LogitsArgs {
  Meeting meeting;
  const float* logits;  // [rows, words] of this rank
  int32_t* arrived;     // [1], zero before and after
  int rows, words, first_word, vocab;
};

// grid (any): every rank's words into rank 0's [rows, vocab]. The block of rank 0 that comes last waits for the others. Rank 0 must not
// start this before it has done with the logits of the meeting before; that the others don't is `spread_tokens`' matter.
__global__ void __launch_bounds__(512) push_logits(const __grid_constant__ LogitsArgs a) {
  __shared__ int is_last;
  const Meeting& m = a.meeting;
  wait_for_previous_kernel();
  start_next_kernel();
  const uint32_t count = __ldcg(m.counts) + 1;
  float* target = reinterpret_cast<float*>(memory_of(m, 0) + m.parts);
  const int quads = a.words / 4;
  const long long all = static_cast<long long>(a.rows) * quads, step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
    const long long row = i / quads, quad = i % quads;
    *reinterpret_cast<uint4*>(target + row * a.vocab + a.first_word + 4 * quad) = load_global_16(a.logits + row * a.words + 4 * quad);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    is_last = atomicAdd(a.arrived, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) {
    __threadfence_system();
    *a.arrived = 0;
    if (m.rank != 0) store_release_system(flag_at(m, 0, 0, m.rank), count);
    *m.counts = count;
  }
  if (m.rank == 0 && threadIdx.x > 0 && static_cast<int>(threadIdx.x) < m.ranks) wait_for_rank(m, 0, threadIdx.x, count);
}

struct TokensArgs {
  Meeting meeting;
  int32_t* tokens;  // [rows] in on rank 0, out on the others
  int rows;
};

// One block: rank 0's tokens to all ranks.
__global__ void __launch_bounds__(kMaxRows) spread_tokens(const __grid_constant__ TokensArgs a) {
  const Meeting& m = a.meeting;
  const int row = threadIdx.x;
  wait_for_previous_kernel();
  start_next_kernel();
  const uint32_t count = __ldcg(m.counts) + 1;
  auto place = [&](int owner) { return reinterpret_cast<int32_t*>(memory_of(m, owner) + m.parts) + (count & 1) * kMaxRows + row; };
  if (m.rank == 0) {
    if (row < a.rows)
      for (int other = 1; other < m.ranks; other++) *place(other) = __ldcg(a.tokens + row);
    __syncthreads();
    if (row > 0 && row < m.ranks) store_release_system(flag_at(m, row, 0, 0), count);
  } else {
    if (row == 0) wait_for_rank(m, 0, 0, count);
    __syncthreads();
    if (row < a.rows) a.tokens[row] = __ldcg(place(m.rank));
  }
  __syncthreads();
  if (threadIdx.x == 0) *m.counts = count;
}

Meeting meeting_of(void* counts, void* status, const void* places, float timeout_ms, int rank, int ranks) {
  const unsigned long long* at = static_cast<const unsigned long long*>(places);
  Meeting m = {at[0], at[1], {}, static_cast<uint32_t*>(counts), static_cast<int32_t*>(status), static_cast<long long>(timeout_ms * 1e6f), rank, ranks};
  for (int r = 0; r < ranks; r++) m.bases[r] = at[2 + r];
  return m;
}

}  // namespace

// `places` lies in host memory: {flags, parts, base of each rank}.
extern "C" int tandem_sum_rows(void* counts, void* status, const void* places, float timeout_ms, int rank, int ranks,
                               const void* x, const void* pairs, const void* expert_ids, const void* expert_weights, const void* bias,
                               void* residual, const void* norm_weight, void* normed, int room, int tokens, int columns, int choices,
                               int first_expert, int experts, int is_sorted, float eps, void* stream) {
  if (columns % 8 || columns > 4096 || tokens > room) return -1;
  if (tokens == 0) return 0;
  const SumArgs a = {meeting_of(counts, status, places, timeout_ms, rank, ranks), static_cast<const uint16_t*>(x),
                     static_cast<const uint16_t*>(pairs), static_cast<const int32_t*>(expert_ids),
                     static_cast<const float*>(expert_weights), static_cast<const uint16_t*>(bias), static_cast<uint16_t*>(residual),
                     static_cast<const uint16_t*>(norm_weight), static_cast<uint16_t*>(normed), room, columns, choices, first_expert, experts,
                     eps};
  const int threads = (columns / 8 + 31) / 32 * 32;
  switch (ranks) {
    case 2: return launch(is_sorted ? sum_rows<2, true> : sum_rows<2, false>, dim3(tokens), threads, 0, stream, a);
    case 4: return launch(is_sorted ? sum_rows<4, true> : sum_rows<4, false>, dim3(tokens), threads, 0, stream, a);
    case 8: return launch(is_sorted ? sum_rows<8, true> : sum_rows<8, false>, dim3(tokens), threads, 0, stream, a);
    default: return -1;
  }
}

extern "C" int tandem_meet_best(void* counts, void* status, const void* places, float timeout_ms, int rank, int ranks,
                                const void* best, const void* seq_lens, void* tokens, int rows, int parts, int first_word, void* stream) {
  if (rows > kMaxRows || ranks > kMaxRanks) return -1;
  const BestArgs a = {meeting_of(counts, status, places, timeout_ms, rank, ranks), static_cast<const float*>(best),
                      static_cast<const int32_t*>(seq_lens), static_cast<int32_t*>(tokens), rows, parts, first_word};
  return launch(meet_best, dim3(1), kMaxRows, 0, stream, a);
}

extern "C" int tandem_push_logits(void* counts, void* status, const void* places, float timeout_ms, int rank, int ranks,
                                  const void* logits, void* arrived, int rows, int words, int first_word, int vocab, int blocks,
                                  void* stream) {
  if (words % 4 || first_word % 4 || vocab % 4 || ranks > kMaxRanks) return -1;
  const LogitsArgs a = {meeting_of(counts, status, places, timeout_ms, rank, ranks), static_cast<const float*>(logits),
                        static_cast<int32_t*>(arrived), rows, words, first_word, vocab};
  return launch(push_logits, dim3(blocks), 512, 0, stream, a);
}

extern "C" int tandem_spread_tokens(void* counts, void* status, const void* places, float timeout_ms, int rank,
                                    int ranks, void* tokens, int rows, void* stream) {
  if (rows > kMaxRows || ranks > kMaxRanks) return -1;
  const TokensArgs a = {meeting_of(counts, status, places, timeout_ms, rank, ranks), static_cast<int32_t*>(tokens), rows};
  return launch(spread_tokens, dim3(1), kMaxRows, 0, stream, a);
}
