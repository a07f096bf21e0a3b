"""What is compiled before a rank starts is what the rank runs: the same kernels with the same shapes, at every layout."""

from __future__ import annotations

import pytest
import torch

from model.config import ModelConfig
from model.prefill_cuda import CudaPrefill
from model.prefill_kernels import compile_prefill_kernels
from model.prefill_weights import PrefillWeights, prepare_prefill_weights
from model.weights import load_shard


def shapes(weights: PrefillWeights) -> dict[str, object]:
    layer = vars(weights.layers[0])
    tensors = {"lm_head": weights.lm_head, "embed": weights.embed, "norm": weights.norm} | layer
    return {name: _shape(value) for name, value in tensors.items() if name != "first_expert"}


def _shape(value):
    if isinstance(value, torch.Tensor):
        return (*value.shape, value.dtype)
    return tuple(map(_shape, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 4)])
def test_a_blank_layer_has_the_sizes_of_a_real_one_and_every_length_is_run(tiny, monkeypatch, tp, ep):
    made: list[PrefillWeights] = []
    run: list[int] = []

    class Seen(CudaPrefill):
        def __init__(self, config: ModelConfig, weights: PrefillWeights, *args, **options):
            made.append(weights)
            super().__init__(config, weights, *args, **options)

        def forward(self, batch, kv, on_layer=None):
            run.append(batch.token_ids.shape[0])
            logits = super().forward(batch, kv, on_layer)
            assert logits.isfinite().all()
            return logits

    monkeypatch.setattr("model.prefill_kernels.CudaPrefill", Seen)
    compile_prefill_kernels(
        tiny.config, tp=tp, ep=ep, block_size=16, projections="bf16", device="cpu", lengths=(1, 40), buckets=()
    )  # fmt: skip
    assert run == [1, 40]
    shard = load_shard(tiny.path, tiny.config, tp=tp, ep=ep, rank=0, device="cpu", dtype=torch.bfloat16, weights="fp8", packed=True)
    real = prepare_prefill_weights(tiny.config, shard, "cpu", projections="bf16")
    assert shapes(made[0]) == shapes(real)
