"""The shipped trained model through a decode step with FP8 experts (the kernels' plain twins on a CPU), beside the plain forward."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from benchmarks.decode_served import MAX_BATCH, follow_plain, plain_forward
from kernels.reference import fp8_quant_blocks_ref
from model.build import BuiltModel
from model.config import load_model_config
from model.decode_cuda import CudaDecode, pack_weights
from model.decode_step_cuda import CudaDecodeStep
from model.parallel import LocalGroup
from model.shards import Fp8Matrix
from model.trained_fixture import write_trained_fixture
from model.weights import load_shard


def test_greedy_tokens_are_those_of_the_plain_forward(tmp_path):
    write_trained_fixture(tmp_path)
    config = load_model_config(tmp_path)
    shard = load_shard(tmp_path, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights="mxfp4")

    def converted(matrix):
        return Fp8Matrix(*fp8_quant_blocks_ref(matrix), *matrix.shape[1:])

    layers = deque(
        replace(layer, experts=replace(layer.experts, gate_up=converted(layer.experts.gate_up), down=converted(layer.experts.down)))
        for layer in shard.layers
    )
    weights = pack_weights(replace(shard, layers=()), layers)

    def decode(kv):
        return CudaDecodeStep(CudaDecode(config, weights, kv, max_batch=MAX_BATCH, max_positions=256, device="cpu"), MAX_BATCH)

    built = BuiltModel(config, None, decode=decode)
    assert "9 of 9" in follow_plain(plain_forward(tmp_path, config), built, LocalGroup(), "cpu", prompts=(140, 20, 33), steps=3)
