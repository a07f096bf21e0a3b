"""Attention of a prompt, or of a piece of it, over its own K and V as they left the projection: contiguous rows, not pool blocks.

Contiguous rows are read by TMA in wide tiles, which the paged gather can't, so a prompt's first chunk takes this way; later chunks, whose
keys lie in the pool, take `attention_prefill.py`. FlashInfer's FA3 for full layers, an own Triton kernel for sliding ones, the fp32 twin
elsewhere. Called by `model/`. Legend: T query tokens, S key tokens, H query heads, K KV heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ShapeError
from kernels.attention_prefill import AttentionHeads
from kernels.flashinfer_plan import Planner
from kernels.reference import paged_attention_ref


class PromptAttention:
    """Full causal attention of T tokens over S: themselves and what precedes them.

    Units: graph_sizes: T and S of the CUDA graph that will hold the runs; the plan is then made here and never again
    Effects: the first object compiles its FlashInfer module (minutes); `workspace` may be shared by objects of one stream
    """

    def __init__(self, heads: AttentionHeads, *, workspace: Tensor, graph_sizes: tuple[int, int] | None = None):
        self._heads = heads
        self._sm_scale = heads.head_dim**-0.5
        self._planned: tuple[int, int] | None = None
        self._wrapper = self._make_wrapper(workspace, graph_sizes is not None) if workspace.is_cuda else None
        self._planner = Planner(self._wrapper)
        if graph_sizes is not None:
            self.plan(*graph_sizes)

    def plan(self, num_tokens: int, num_keys: int | None = None) -> None:
        """Fixes T and S of the next runs; nothing is done when they are the planned ones.

        Units: num_keys: S, the queries being its last T; None: T
        Effects: host work and small copies to the device on the current stream; waits for the last plan's copy; not capturable
        """
        sizes = (num_tokens, num_tokens if num_keys is None else num_keys)
        if sizes == self._planned:
            return
        self._planned = sizes
        if self._wrapper is not None:
            qo_indptr, kv_indptr = (torch.tensor([0, size], dtype=torch.int32) for size in sizes)
            self._planner.plan(
                qo_indptr, kv_indptr, self._heads.num_qo_heads, self._heads.num_kv_heads, self._heads.head_dim, causal=True,
                q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
            )  # fmt: skip

    def run(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        """Softmax attention with the sink once per row.

        Shapes: q [T, H, D] bf16; k, v [S, K, D] bf16, all values finite; T and S as planned; sinks [H] fp32
        Returns: [T, H, D] in q.dtype
        Effects: capturable; no host sync
        Raises: ShapeError if T or S is not the planned one
        Source: FlashInfer BatchPrefillWithRaggedKVCacheWrapper with its attention-sink variant; `paged_attention_ref`
        """
        if (q.shape[0], k.shape[0]) != self._planned:
            raise ShapeError(f"planned for {self._planned} tokens, got {q.shape[0]} over {k.shape[0]}")
        if self._wrapper is None:
            return _attention_on_cpu(q, k, v, sinks, None, self._sm_scale)
        return self._wrapper.run(q, k, v, sinks, self._sm_scale, out=torch.empty_like(q))

    def _make_wrapper(self, workspace: Tensor, in_graph: bool):
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
        from flashinfer.jit.attention.variants import attention_sink_decl

        # the module that the paged sink wrapper builds holds the ragged kernel too: same name and arguments, one compilation
        bf16, head_dim = torch.bfloat16, self._heads.head_dim
        arguments = [
            "batch_prefill_attention_sink_bf16_swa_False_fa3", bf16, bf16, bf16, torch.int32, head_dim, head_dim,
            ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", attention_sink_decl["fa3"],
        ]  # fmt: skip
        options = {"use_sliding_window": False, "use_fp16_qk_reduction": False, "pos_encoding_mode": 0}
        buffers = {}
        if in_graph:
            starts = [torch.zeros(2, dtype=torch.int32, device=workspace.device) for _ in range(2)]
            buffers = {"use_cuda_graph": True, "qo_indptr_buf": starts[0], "kv_indptr_buf": starts[1]}
        return BatchPrefillWithRaggedKVCacheWrapper(
            workspace, kv_layout="NHD", backend="fa3", jit_args=arguments, jit_kwargs=options, **buffers
        )


def window_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window_tokens: int) -> Tensor:
    """Sliding-window attention of the last T of S tokens, sink once per row.

    Shapes: q [T, H, D] bf16; k, v [S, K, D] bf16; sinks [H] fp32
    Units: window_tokens: keys a query sees, itself included
    Returns: [T, H, D] in q.dtype; accumulated in fp32, probabilities rounded to bf16
    Effects: capturable; no plan; no host sync
    Source: `paged_attention_ref`
    """
    sm_scale = q.shape[2] ** -0.5
    if not q.is_cuda:
        return _attention_on_cpu(q, k, v, sinks, window_tokens, sm_scale)
    from kernels.triton_ops.window_attention import launch_window_attention

    out = torch.empty_like(q)
    if q.shape[0]:
        launch_window_attention(q, k, v, sinks, out, window_tokens, sm_scale)
    return out


def _attention_on_cpu(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, sm_scale: float) -> Tensor:
    """The rows as a pool of one block."""
    queries, keys = q.shape[0], k.shape[0]
    pool = torch.stack((k, v)).transpose(1, 2)[None].contiguous()  # [1, 2, K, S, D]
    zero, end = torch.tensor([0]), torch.tensor([keys])
    table, bounds = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, queries])
    return paged_attention_ref(q, pool, table, zero, end, bounds, sinks, window=window, sm_scale=sm_scale)
