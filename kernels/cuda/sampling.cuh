// What a token is chosen by: the largest logit, or of logit / temperature + Gumbel noise. Random numbers are Philox4x32-10 of (seed, position,
// token id), so that a row's token depends on its own logits and parameters alone.
#pragma once
#include "primitives.cuh"

constexpr int kBadLogits = -1;
constexpr int kNotFinite = 1 << 30;  // an id that outranks every token and marks a row that can't be sampled

__device__ __forceinline__ uint32_t philox(unsigned long long seed, uint32_t position, uint32_t token) {
  uint32_t c0 = token, c1 = position, c2 = 0, c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0, h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0;
    c1 = l1;
    c2 = h0 ^ c3 ^ k1;
    c3 = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c0;
}

// Standard Gumbel noise; the largest (logit / temperature + noise) is a sample of the softmax.
__device__ __forceinline__ float gumbel(unsigned long long seed, uint32_t position, uint32_t token) {
  const float u = (static_cast<float>(philox(seed, position, token) >> 8) + 0.5f) * (1.0f / 16777216.0f);
  return -logf(-logf(u));
}

constexpr float kLargestInverse = 1e30f;  // of a temperature: logits times it are finite, and noise is nothing beside them

// Whether the token takes more than the largest of logit / temperature + noise over all words.
__device__ __forceinline__ bool has_filter(float temperature, int top_k, float top_p, float min_p, int vocab) {
  return temperature > 0.0f && ((top_k > 0 && top_k < vocab) || top_p < 1.0f || min_p > 0.0f);
}

struct Draw {
  float inverse;  // of the temperature, 1 for greedy
  bool is_noisy;
  uint32_t position;
  unsigned long long seed;
};
__device__ __forceinline__ Draw draw_of(float temperature, long long seed, int position) {
  const bool is_noisy = temperature > 0.0f;
  return {is_noisy ? fminf(1.0f / temperature, kLargestInverse) : 1.0f, is_noisy, static_cast<uint32_t>(position), static_cast<unsigned long long>(seed)};
}
// What the token of the largest one is chosen by: grows with the logit, for the same draw and token.
__device__ __forceinline__ float perturbed(const Draw& draw, float logit, int token) {
  return draw.is_noisy ? fmaf(logit, draw.inverse, gumbel(draw.seed, draw.position, static_cast<uint32_t>(token))) : logit;
}

struct Best {
  float value;
  int id;
};
__device__ __forceinline__ Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a; }
