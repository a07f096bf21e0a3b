// What both decode attention kernels share: one KV block of 16 keys against the query heads of one KV head, by one warp on tensor cores.
#pragma once
#include "primitives.cuh"

namespace {

constexpr int kBlockSize = 16, kHeadDim = 64, kGroup = 8;
constexpr float kLog2e = 1.4426950408889634f;

struct Keys { uint4 k[2][2], v[4]; };  // one KV block: keys g, g + 8 for the scores; keys 2c, 2c + 1, 2c + 8, 2c + 9 for the values

struct State {
  float acc[8][4];   // [i][0..1]: head g, dimensions 16 c + i and 16 c + 8 + i; [2..3] rows that the group does not fill
  float top, sum;    // running maximum (base 2) and sum of head g
};

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

}  // namespace
