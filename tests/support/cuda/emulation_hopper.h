// Twins of `kernels/cuda/hopper.cuh` for the emulation. Descriptors, swizzle and fragments are computed as the hardware does, on offsets
// into the block's shared memory; products run as late as they may, when somebody waits for them, so that a stage overwritten too early shows.
#pragma once
#include <deque>
#include <map>

constexpr long long PATIENCE = 120000000000;
inline long long cycles() { return time_ns(); }

struct CUtensorMap {
  const unsigned char* base;
  int64_t columns, rows, matrices;
  int box_rows;
};
inline int describe_rows(CUtensorMap* map, const void* base, int columns, int rows, int matrices, int box_rows) {
  if (reinterpret_cast<uintptr_t>(base) % 16 || columns % 16 || box_rows < 1 || box_rows > 256) abort();
  *map = {static_cast<const unsigned char*>(base), columns, rows, matrices, box_rows};
  return 0;
}

namespace emulation {
inline uint64_t shared_offset(const void* p) { return static_cast<const unsigned char*>(p) - dynamic_shared(); }
inline uint64_t swizzled(uint64_t offset) { return offset ^ ((offset >> 7 & 7) << 4); }
inline std::map<uint64_t*, int64_t>& missing_bytes() { static thread_local std::map<uint64_t*, int64_t> m; return m; }
inline float fp8_value(unsigned char x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  float v = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
  if ((x & 0x7F) == 0x7F) v = NAN;
  return x & 0x80 ? -v : v;
}
inline const float* fp8_table() {
  static const std::vector<float> table = [] {
    std::vector<float> t(256);
    for (int i = 0; i < 256; i++) t[i] = fp8_value(i);
    return t;
  }();
  return table.data();
}
inline unsigned char fp8_round(float x) {
  if (std::isnan(x)) return 0x7F;
  const unsigned char sign = std::signbit(x) ? 0x80 : 0;
  x = std::min(std::fabs(x), 448.0f);
  if (x == 0.0f) return sign;
  int exponent;
  std::frexp(x, &exponent);
  exponent = std::max(exponent - 1, -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(x, 3 - exponent)));  // 8 to 16, or below 8 where subnormal
  return sign | static_cast<unsigned char>(steps + ((exponent + 6) << 3));
}
// A started product of one thread: 32 columns of 64 rows of A and n of B.
struct Product {
  float* d;
  int n;
  uint64_t a, b;
  bool is_last;  // of its group
};
inline std::deque<Product>& products() {
  static thread_local std::vector<std::deque<Product>> all(1024);
  return all[block()->current->rank * 512 + block()->current->thread];
}
inline void row_of_operand(float (&out)[32], uint64_t descriptor, int row) {
  if ((descriptor >> 62) != 1 || (descriptor >> 49 & 7) != 0) abort();
  const uint64_t start = (descriptor & 0x3FFF) << 4, group = (descriptor >> 32 & 0x3FFF) << 4;
  for (int k = 0; k < 32; k++)
    out[k] = fp8_table()[dynamic_shared()[swizzled(start + row / 8 * group + row % 8 * 128 + k)]];
}
inline void carry_out(const Product& p) {
  const int t = block()->current->thread % 128, w = t / 32, g = t % 32 / 4, c = t % 4;
  float a[2][32], b[32];
  for (int s = 0; s < 2; s++) row_of_operand(a[s], p.a, 16 * w + 8 * s + g);
  for (int j = 0; j < p.n / 8; j++)
    for (int i = 0; i < 2; i++) {
      row_of_operand(b, p.b, 8 * j + 2 * c + i);
      for (int s = 0; s < 2; s++) {
        float sum = 0.0f;
        for (int k = 0; k < 32; k++) sum += a[s][k] * b[k];
        p.d[4 * j + 2 * s + i] += sum;
      }
    }
}
struct Meeting { int arrived = 0; uint64_t generation = 0; };
}  // namespace emulation

inline unsigned cluster_rank() { return emulation::block()->current->rank; }
// The same place in another block of the cluster.
template <typename T>
inline T* place_in(T* p, unsigned rank) {
  return reinterpret_cast<T*>(emulation::dynamic_shared(rank) + emulation::shared_offset(p));
}
inline void copy_box_to(unsigned rank, void* shared, const CUtensorMap& map, int column, int row, int matrix, uint64_t* barrier) {
  using namespace emulation;
  const uint64_t to = shared_offset(shared);
  if (to % 1024) abort();
  for (int r = 0; r < map.box_rows; r++)
    for (int k = 0; k < 128; k++) {
      const bool is_inside = row + r >= 0 && row + r < map.rows && column + k < map.columns && matrix < map.matrices;
      dynamic_shared(rank)[swizzled(to + r * 128 + k)] = is_inside ? map.base[(matrix * map.rows + row + r) * map.columns + column + k] : 0;
    }
  missing_bytes()[place_in(barrier, rank)] -= map.box_rows * 128;
}
inline void copy_box(void* shared, const CUtensorMap& map, int column, int row, int matrix, uint64_t* barrier) {
  copy_box_to(cluster_rank(), shared, map, column, row, matrix, barrier);
}
inline void copy_box_to_both(void* shared, const CUtensorMap& map, int column, int row, int matrix, uint64_t* barrier) {
  for (unsigned rank = 0; rank < 2; rank++) copy_box_to(rank, shared, map, column, row, matrix, barrier);
}
inline void barrier_expect(uint64_t* barrier, int bytes) {
  emulation::missing_bytes()[barrier] += bytes;
  barrier_arrive(barrier);
}
inline void send(int* shared, int value, uint64_t* barrier, unsigned rank) {
  *place_in(shared, rank) = value;
  emulation::missing_bytes()[place_in(barrier, rank)] -= 4;
}
inline void barrier_arrive_at(uint64_t* barrier, unsigned rank) { barrier_arrive(place_in(barrier, rank)); }
// A phase has passed when the arrivals are complete and the bytes too; none starts before somebody has seen the end of the last.
inline bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  for (int turn = 0; turn < 2; turn++) {
    if ((*barrier & 1) != parity && emulation::missing_bytes()[barrier] == 0) return true;
    emulation::yield();
  }
  return false;
}
inline void cluster_meet() {
  static thread_local emulation::Meeting m;
  const uint64_t generation = m.generation;
  m.arrived++;
  while (m.generation == generation) {
    int live = 0;
    for (const auto& gate : emulation::block()->gates) live += gate.live;
    if (m.arrived == live) {
      m.arrived = 0;
      m.generation++;
    } else {
      emulation::yield();
    }
  }
}
inline void end_with_error() { abort(); }
template <int THREADS>
inline void meet(int id) {
  static thread_local emulation::Meeting meetings[2][16];
  emulation::Meeting& m = meetings[cluster_rank()][id];
  const uint64_t generation = m.generation;
  if (++m.arrived == THREADS) {
    m.arrived = 0;
    m.generation++;
  } else {
    while (m.generation == generation) emulation::yield();
  }
}
inline int uniform(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }
inline uint32_t transpose_8x8(uint32_t x) {
  emulation::LaneInput in = {};
  in.words[0] = x;
  const auto* all = emulation::exchange(in);
  const int lane = threadIdx.x % 32, row = lane / 4, first = 2 * (lane % 4);
  uint32_t y = 0;
  for (int i = 0; i < 2; i++) y |= (all[4 * (first + i) + row / 2].words[0] >> (16 * (row % 2)) & 0xFFFF) << (16 * i);
  return y;
}
inline uint32_t fp8x2_pack(float low, float high) { return emulation::fp8_round(low) | emulation::fp8_round(high) << 8; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }

inline void product_fence() {}
inline void product_commit() {
  auto& all = emulation::products();
  if (!all.empty()) all.back().is_last = true;
}
template <int PENDING>
inline void product_wait() {
  auto& all = emulation::products();
  int groups = 0;
  for (const auto& p : all) groups += p.is_last;
  while (groups > PENDING) {
    const emulation::Product p = all.front();
    all.pop_front();
    emulation::carry_out(p);
    groups -= p.is_last;
  }
}
template <int COUNT>
inline void pin(float (&)[COUNT]) {}
inline uint64_t operand(const void* p) {
  const uint64_t offset = emulation::shared_offset(p);
  if (offset % 1024 || offset >= 1 << 18) abort();
  return offset >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
template <int N>
inline void product(float (&d)[N / 2], uint64_t a, uint64_t b) {
  emulation::products().push_back({d, N, a, b, false});
}
