"""The shipped trained model through a decode step with FP8 experts (the kernels' plain twins on a CPU), beside the plain forward."""

from __future__ import annotations

import torch

from benchmarks.decode_served import MAX_BATCH, follow_plain, plain_forward
from model.build import BuiltModel
from model.config import load_model_config
from model.convert import convert_checkpoint
from model.decode_cuda import CudaDecode, pack_weights
from model.decode_step_cuda import CudaDecodeStep
from model.parallel import LocalGroup
from model.trained_fixture import write_trained_fixture
from model.weights import load_shard


def test_greedy_tokens_are_those_of_the_plain_forward(tmp_path):
    write_trained_fixture(tmp_path)
    config = load_model_config(tmp_path)
    convert_checkpoint(tmp_path)
    weights = pack_weights(load_shard(tmp_path, config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights="fp8", packed=True))

    def decode(kv):
        return CudaDecodeStep(CudaDecode(config, weights, kv, max_batch=MAX_BATCH, max_positions=256, device="cpu"), MAX_BATCH)

    built = BuiltModel(config, None, decode=decode)
    assert "9 of 9" in follow_plain(plain_forward(tmp_path, config), built, LocalGroup(), "cpu", prompts=(140, 20, 33), steps=3)
