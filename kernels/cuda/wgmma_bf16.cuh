// Products of a warpgroup (four warps) on Hopper's tensor cores: bf16 weights from registers, bf16 tokens from shared memory, fp32 sums.
// Warp w of the four holds rows 16 w .. 16 w + 15 in the fragments of `mma_bf16`. Tokens lie in pieces of 8 tokens x 8 columns, 128
// contiguous bytes, 16 a token. Products run behind the program: what they read and write is theirs until they have been waited for.
#pragma once
#include "primitives.cuh"

#ifndef TANDEM_EMULATE
// `along_columns`, `along_tokens`: bytes from a piece to its neighbour, multiples of 16.
__device__ __forceinline__ uint64_t wgmma_tokens(const void* shared, int along_columns, int along_tokens) {
  return (shared_address(shared) & 0x3FFFFu) >> 4 | static_cast<uint64_t>(along_columns >> 4) << 16 |
         static_cast<uint64_t>(along_tokens >> 4) << 32;
}
// This thread's stores to shared memory so far are seen by products that start after a barrier.
__device__ __forceinline__ void wgmma_fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Between writes to registers by the program and the products that use them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// D (64 rows x 8 NT tokens) += A (64 x 16) * B (16 columns x tokens); d[nt] as `mma_bf16`'s of tokens 8 nt .. 8 nt + 7.
__device__ __forceinline__ void wgmma_bf16(float (&d)[1][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens));
}
__device__ __forceinline__ void wgmma_bf16(float (&d)[2][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens));
}
__device__ __forceinline__ void wgmma_bf16(float (&d)[3][4], const uint32_t (&a)[4], uint64_t tokens) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens));
}
#endif
