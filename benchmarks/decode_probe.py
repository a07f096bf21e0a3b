"""Launches single decode kernels for a profiler: experts at batch 8 and 64 of 20b, and full attention at batch 32."""

from __future__ import annotations

import torch

from benchmarks.decode_kernels import full_case
from benchmarks.decode_random import randn, random_choices, random_weights
from benchmarks.prefill_random import gpt_oss_config
from kernels.moe_decode import launch_experts


def main() -> None:
    config = gpt_oss_config("20b", 4)
    weights = random_weights(config)
    arrived = torch.zeros(2, dtype=torch.int32, device="cuda")
    for batch, variant in ((8, 0), (8, 9), (64, 0), (128, 3)):
        x, hidden, out = randn(batch, 2880), randn(batch * 4, 2880), randn(batch, 4, 2880)
        ids = random_choices(1, batch, config)[0]
        launch_experts(x, ids, weights.layers[batch % 3].experts, hidden, arrived, out, alpha=1.702, limit=7.0, variant=variant)
        torch.cuda.synchronize()
    run, _ = full_case(32, 8192, 1)
    run(0, 0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
