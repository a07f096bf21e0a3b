"""Runs the prefill forward with every kernel checked against its CPU twin on the very same inputs, and names the first that departs.

    python3 benchmarks/prefill_shadow.py [number of one set of sizes]

Random checkpoints of odd sizes, whole prompts and later chunks. Slow on purpose (every input is copied to the host): for finding a defect,
and as a check at sizes that no other check covers. Memory that a kernel might read or leave unwritten is NaN.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import model.prefill_cuda
import model.prefill_inputs
import model.prefill_pieces
import model.prefill_projections
from benchmarks.prefill_check_tools import poison_memory
from kernels.attention_prefill import PrefillAttention
from kernels.attention_prompt import PromptAttention
from kernels.moe_prefill import ExpertRows
from kernels.reference import fp8_dequant_rows_ref
from model.batch import SequenceView, build_prefill_batch
from model.config import ModelConfig
from model.convert import convert_checkpoint
from model.fixture import write_random_fixture
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.prefill_cuda import CudaPrefill
from model.prefill_weights import SERVED_PROJECTIONS, Projections, prepare_prefill_weights
from model.weights import load_shard

MODULES = (model.prefill_cuda, model.prefill_inputs, model.prefill_pieces, model.prefill_projections)
OPS = (
    "add_norm", "add_norm_quantize", "add_output", "combine", "combine_norm", "combine_norm_quantize", "experts_down", "experts_gate_up",
    "gemm_fp8", "permute_rows", "quantize_rows", "rope_write_kv", "route", "window_attention",
)  # fmt: skip
TOLERANCE = 2e-2  # relative: single FP8 rounding steps, bf16 outputs
BLOCK_SIZE = 16
SIZES: tuple[dict[str, int], ...] = (
    {},  # the trained fixture's: 256 hidden, 192 intermediate, 8 experts, 8 query and 2 KV heads
    {"hidden_size": 384, "intermediate_size": 256, "num_experts": 5, "num_qo_heads": 6, "num_kv_heads": 1},
    {"hidden_size": 2880, "intermediate_size": 2880, "num_experts": 32, "num_qo_heads": 64, "num_kv_heads": 8, "num_layers": 2},
)


@dataclass(frozen=True)
class Departure:
    """`call`: how many calls came before it. `what`: the output, or the argument that the op fills."""

    op: str
    call: int
    what: str
    error: float

    def __str__(self) -> str:
        return f"{self.op} (call {self.call}) {self.what}: relative error {self.error:.2e}"


class Shadow:
    """Wraps ops; collects departures. `worst`: largest relative error of each op."""

    def __init__(self, tolerance: float = TOLERANCE):
        self.departures: list[Departure] = []
        self.worst: dict[str, float] = {}
        self.calls = 0
        self._tolerance = tolerance

    def wrap(self, name: str, op: Callable, twin: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            twin_args, twin_kwargs = _on_cpu(args), _on_cpu(kwargs)
            if torch.cuda.is_available():
                poison_memory()
            got = op(*args, **kwargs)
            expected = twin(*twin_args, **twin_kwargs)
            rows = next((_used(x) for x in (*args, got) if isinstance(x, ExpertRows)), None)
            for what, a, b in _pairs(name, (got, args, kwargs), (expected, twin_args, twin_kwargs), rows):
                self._compare(name, what, a, b)
            self.calls += 1
            return got

        return run

    def _compare(self, op: str, what: str, got: Tensor, expected: Tensor) -> None:
        got, expected = got.detach().cpu().double(), expected.double()
        same_places = bool((got.isnan() == expected.isnan()).all())
        got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
        error = float((got - expected).norm() / expected.norm().clamp(min=1e-9)) if same_places else float("inf")
        self.worst[op] = max(self.worst.get(op, 0.0), error)
        if not error <= self._tolerance:  # NaN too
            self.departures.append(Departure(op, self.calls, what, error))


def _on_cpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        copied = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)  # the scales' layout is part of the input
        return copied.copy_(x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: _on_cpu(getattr(x, f.name)) for f in fields(x)})
    if isinstance(x, tuple | list):
        items = [_on_cpu(item) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        return {key: _on_cpu(value) for key, value in x.items()}
    return x


def _used(rows: ExpertRows) -> Tensor:
    flat = rows.rows.flatten().cpu().long()
    return flat[flat >= 0]


def _pairs(path: str, got: Any, expected: Any, rows: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors to compare, FP8 rows with their scales as one; of a row buffer only the rows that hold a token."""
    if isinstance(got, Tensor):
        if path.endswith("ranks"):
            return  # in no fixed order
        yield path, _rows_of(got, rows), _rows_of(expected, rows)
    elif is_dataclass(got) and not isinstance(got, type):
        if isinstance(got, ExpertRows):
            yield from _pairs(f"{path}.rows", (got.q, got.scales), (expected.q, expected.scales), rows)
            yield f"{path}.places", got.rows, expected.rows
            return
        for f in fields(got):
            yield from _pairs(f"{path}.{f.name}", getattr(got, f.name), getattr(expected, f.name), rows)
    elif isinstance(got, tuple | list):
        if len(got) == 2 and isinstance(got[0], Tensor) and got[0].dtype == torch.float8_e4m3fn:
            pairs = [tuple(_rows_of(t.cpu(), rows) for t in pair) for pair in (got, expected)]
            yield f"{path} fp8", *(fp8_dequant_rows_ref(q, scales, q.shape[1]) for q, scales in pairs)
            return
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            yield from _pairs(f"{path}[{number}]", a, b, rows)
    elif isinstance(got, dict):
        for key in got:
            yield from _pairs(f"{path}.{key}", got[key], expected[key], rows)


def _rows_of(t: Tensor, rows: Tensor | None) -> Tensor:
    """Of a tensor as long as the row buffer, the rows in use."""
    return t[rows] if rows is not None and rows.numel() and t.dim() == 2 and t.shape[0] > int(rows.max()) else t


@contextmanager
def shadowed(shadow: Shadow) -> Iterator[None]:
    """Every op of the prefill forward, attention included, checked while the block runs."""
    saved = [(module, name, getattr(module, name)) for module in MODULES for name in OPS if hasattr(module, name)]
    saved += [(owner, "run", owner.run) for owner in (PrefillAttention, PromptAttention)]
    for owner, name, op in saved:
        if isinstance(owner, type):
            setattr(owner, name, _attention(shadow, owner.__name__, op))
        else:
            setattr(owner, name, shadow.wrap(name, op, op))
    try:
        yield
    finally:
        for owner, name, op in saved:
            setattr(owner, name, op)


def _attention(shadow: Shadow, name: str, run: Callable) -> Callable:
    def checked(attention: Any, *args: Tensor) -> Tensor:
        twin = copy.copy(attention)
        twin._wrapper = None
        if isinstance(attention, PrefillAttention):
            twin._plan = _on_cpu(attention._plan)
        return shadow.wrap(name, lambda *a: run(attention, *a), lambda *a: run(twin, *a))(*args)

    return checked


def run_sizes(device: str, size: dict[str, int], projections: Projections = SERVED_PROJECTIONS) -> tuple[ModelConfig, Shadow]:
    """A prompt of 200 tokens, then a chunk of 37, of one layer after the other. Returns: the sizes, and what was seen"""
    with tempfile.TemporaryDirectory() as folder:
        config = write_random_fixture(Path(folder), vocab_size=1024, **size)
        convert_checkpoint(Path(folder))
        shard = load_shard(Path(folder), config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.bfloat16, weights="fp8", packed=True)
        weights = prepare_prefill_weights(config, shard, device, projections=projections)
    prefill = CudaPrefill(config, weights, LocalGroup(), block_size=BLOCK_SIZE, device=device, max_positions=512)
    tokens = torch.randint(0, 1024, (237,), generator=torch.Generator().manual_seed(1)).tolist()
    blocks = torch.randperm(20, generator=torch.Generator().manual_seed(2)).tolist()
    kv = KVCache(config.kv_geometry(BLOCK_SIZE, "bfloat16"), 1, 0, 20, 20, device)
    shadow = Shadow()
    with shadowed(shadow):
        for begin, end in ((0, 200), (200, 237)):
            view = SequenceView(tokens[begin:end], begin, blocks, 0, blocks)
            prefill.forward(build_prefill_batch(view, BLOCK_SIZE, "cpu"), kv)
    return config, shadow


def check_size(device: str, size: dict[str, int], projections: Projections) -> str:
    """One line: the first op that departs, or the largest error."""
    config, shadow = run_sizes(device, size, projections)
    label = f"C{config.hidden_size} I{config.intermediate_size} E{config.num_experts} H{config.num_qo_heads}/{config.num_kv_heads}"
    if shadow.departures:
        return f"FAIL {label} {projections}: first {shadow.departures[0]}, {len(shadow.departures)} in all"
    worst = max(shadow.worst.items(), key=lambda item: item[1])
    return f"ok   {label} {projections}: {shadow.calls} calls, worst {worst[0]} {worst[1]:.1e}"


def check_sizes(device: str = "cuda") -> Iterator[str]:
    """Every set of sizes with both kinds of projections. Compiles some fifty GEMMs, minutes the first time."""
    for size in SIZES:
        for projections in ("fp8", SERVED_PROJECTIONS):
            yield check_size(device, size, projections)


if __name__ == "__main__":
    if len(sys.argv) == 2:  # the number of one set of sizes, with the projections that are served
        print(check_size("cuda", SIZES[int(sys.argv[1])], SERVED_PROJECTIONS), flush=True)
    else:
        for line in check_sizes():
            print(line, flush=True)
