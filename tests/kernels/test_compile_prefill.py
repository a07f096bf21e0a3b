import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "quantize_rows", "add_norm_quantize", "combine_norm_quantize", "rope_write_kv", "choose", "window_attention", "permute_rows",
}  # fmt: skip


def test_every_prefill_kernel_compiles_for_hopper(tmp_path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed (extra `gpu`)")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(root / "tests/kernels/compile_prefill.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = {line.split()[0]: line.split()[2] for line in done.stdout.splitlines()}
    assert set(built) == KERNELS
    assert built["window_attention"] == "wgmma", "the sliding attention must run on the tensor cores"
