"""A checkpoint with faults is refused before anything is read, with all of its faults in one error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from model.checkpoint import INDEX, file_specs, hf_specs, open_checkpoint, original_spans
from model.fixture import fixture_config, random_tensors, write_checkpoint
from model.weights import load_shard
from tests.support.tiny_checkpoint import Tiny
from tests.support.tolerance import assert_same_bytes

SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in range(3)]


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor], int], None]) -> None:
    """Applies `change(tensors, shard)` to every shard and writes it again."""
    for i, name in enumerate(SHARDS):
        tensors = load_file(folder / name)
        change(tensors, i)
        save_file(tensors, folder / name)


def in_whichever(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda tensors, _: change(tensors) if name in tensors else None)


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return in_whichever(name, lambda tensors: tensors.update({name: make(tensors[name])}))


def truncate(folder: Path, name: str, by: int) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-by] if by > 0 else data + b"\0" * -by)


def write(folder: Path, shard: int, data: bytes) -> None:
    (folder / SHARDS[shard]).write_bytes(data)


def swap_files(folder: Path) -> None:
    (folder / SHARDS[0]).rename(folder / "x")
    (folder / SHARDS[1]).rename(folder / SHARDS[0])
    (folder / "x").rename(folder / SHARDS[1])


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    tree = json.loads((folder / INDEX).read_text())
    change(tree["weight_map"])
    (folder / INDEX).write_text(json.dumps(tree))


def swap_gate_up_and_down(folder: Path) -> None:
    up, down = (f"model.layers.2.mlp.experts.{name}_proj_blocks" for name in ("gate_up", "down"))
    found = {}
    edit(folder, lambda tensors, _: found.update({name: tensors[name] for name in (up, down) if name in tensors}))
    replaced(up, lambda _: found[down])(folder)
    replaced(down, lambda _: found[up])(folder)


@dataclass(frozen=True)
class Fault:
    name: str
    make: Callable[[Path], None]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


ROUTER = "model.layers.0.mlp.router.weight"  # in the first file
BIAS = "model.layers.3.self_attn.q_proj.bias"  # in the last
FAULTS = [
    Fault("missing-shard", lambda folder: (folder / SHARDS[1]).unlink(), (SHARDS[1], "No such file")),
    Fault("truncated-by-one-byte", lambda folder: truncate(folder, SHARDS[2], 1), (SHARDS[2], "truncated")),
    Fault("cut-inside-the-header", lambda folder: write(folder, 0, b"\x10\x27" + b"\0" * 6 + b"{"), (SHARDS[0], "truncated")),
    Fault("empty-file", lambda folder: write(folder, 0, b""), (SHARDS[0], "0 bytes")),
    Fault("longer-than-described", lambda folder: truncate(folder, SHARDS[0], -3), (SHARDS[0], "too long")),
    Fault("header-is-not-json", lambda folder: write(folder, 0, b"\x04" + b"\0" * 7 + b"nope"), (SHARDS[0], "broken safetensors")),
    Fault("missing-tensor", in_whichever(ROUTER, lambda tensors: tensors.pop(ROUTER)), (f"{ROUTER} is missing",)),
    Fault(
        "extra-tensor",
        in_whichever(ROUTER, lambda tensors: tensors.update(surplus=torch.zeros(3))),
        ("tensor surplus in", "is not one of gpt-oss"),
    ),
    Fault("wrong-dtype", replaced(ROUTER, lambda t: t.float()), (f"{ROUTER} is F32, expected BF16",)),
    Fault("unknown-dtype", replaced(ROUTER, lambda t: t.to(torch.int64)), (f"{ROUTER} is I64, expected BF16",)),
    Fault("transposed", replaced(ROUTER, lambda t: t.T.contiguous()), (f"{ROUTER} has shape [256, 8], expected [8, 256]",)),
    Fault(
        "swapped-matrices",
        swap_gate_up_and_down,
        ("gate_up_proj_blocks has shape [8, 256, 6, 16], expected [8, 384, 8, 16]", "down_proj_blocks has shape [8, 384, 8, 16]"),
    ),
    Fault("swapped-files", swap_files, (f"is in {SHARDS[0]}, {INDEX} says {SHARDS[1]}", f"is in {SHARDS[1]}, {INDEX} says {SHARDS[0]}")),
    Fault(
        "index-lacks-a-tensor",
        lambda folder: rewrite_index(folder, lambda index: index.pop(ROUTER)),
        (f"{ROUTER} is in", "says nothing of it"),
    ),
    Fault(
        "index-leaves-the-folder",
        lambda folder: rewrite_index(folder, lambda index: index.update({ROUTER: "../other.safetensors"})),
        ("'../other.safetensors' is not a file of this folder",),
    ),
    Fault("index-is-broken", lambda folder: (folder / INDEX).write_text('{"weight_map": 3}'), (f"1 problem(s): {INDEX}",)),
    Fault(
        "doubled-tensor",
        lambda folder: edit(folder, lambda tensors, _: tensors.update({ROUTER: torch.zeros(8, 256, dtype=torch.bfloat16)})),
        (f"tensor {ROUTER} is in {SHARDS[0]} and in {SHARDS[1]}",),
    ),
    Fault("nothing-there", lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")], ("no .safetensors",)),
]


def everything(folder: Path) -> None:
    replaced(ROUTER, lambda t: t.T.contiguous())(folder)
    replaced(BIAS, lambda t: t.float())(folder)
    in_whichever(BIAS, lambda tensors: tensors.update(surplus=torch.zeros(3)))(folder)
    (folder / SHARDS[1]).unlink()
    truncate(folder, SHARDS[2], 100)


@pytest.fixture
def copy(tiny: Tiny, tmp_path: Path) -> Path:
    shutil.copytree(tiny.path, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_named_before_anything_is_loaded(tiny, copy, fault: Fault):
    fault.make(copy)
    with pytest.raises(ConfigError) as refused:
        load_shard(copy, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    for reason in fault.reasons:
        assert reason in str(refused.value)


def test_all_faults_come_in_one_error(tiny, copy):
    everything(copy)
    with pytest.raises(ConfigError) as refused:
        open_checkpoint(copy, tiny.config)
    text = str(refused.value)
    assert f"file {SHARDS[1]}: No such file" in text
    assert f"file {SHARDS[2]}: truncated" in text
    assert f"{ROUTER} has shape [256, 8]" in text
    assert f"{BIAS} is F32" in text
    assert "tensor surplus" in text
    index = json.loads((copy / INDEX).read_text())["weight_map"]
    for name in (name for name, shard in index.items() if shard == SHARDS[1]):
        assert f"{name} is missing" not in text  # the absent file stands for them


def test_a_fault_costs_no_memory(tiny, copy, monkeypatch):
    """The check reads headers only: no tensor is made before every file was found right."""
    truncate(copy, SHARDS[2], 1)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("allocated"))
    with pytest.raises(ConfigError, match="truncated"):
        load_shard(copy, tiny.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")


def test_a_config_of_another_size_is_told_from_the_tensors(tiny):
    with pytest.raises(ConfigError, match=r"layers\.4\.self_attn\.sinks is missing"):
        open_checkpoint(tiny.path, fixture_config(vocab_size=1024, num_layers=5))
    with pytest.raises(ConfigError, match=r"layers\.3\.self_attn\.sinks in .* is not one of gpt-oss"):
        open_checkpoint(tiny.path, fixture_config(vocab_size=1024, num_layers=3))


def test_without_an_index_all_files_of_the_folder_are_read(tiny, copy):
    (copy / INDEX).unlink()
    checkpoint = open_checkpoint(copy, tiny.config)
    for name, expected in tiny.tensors.items():
        assert_same_bytes(checkpoint.tensor(name), expected, name)
    (copy / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match="is missing"):
        open_checkpoint(copy, tiny.config)


@pytest.mark.parametrize("size", [{}, {"num_qo_heads": 16, "num_kv_heads": 8, "head_dim": 32, "num_layers": 11}], ids=["tiny", "11-layers"])
def test_both_layouts_hold_the_same_tensors_bit_for_bit(tmp_path, size: dict):
    config = fixture_config(vocab_size=64, **size)
    tensors = random_tensors(config)
    write_checkpoint(tmp_path / "hf", config, tensors)
    write_checkpoint(tmp_path / "openai", config, tensors, layout="original")
    hf, original = (open_checkpoint(tmp_path / name, config) for name in ("hf", "openai"))
    assert sorted(original_spans(config)) == sorted(hf_specs(config)) == sorted(tensors)
    for name, expected in tensors.items():
        assert_same_bytes(hf.tensor(name), expected, name)
        assert_same_bytes(original.tensor(name), expected, name)


def test_the_original_layout_has_the_published_names_and_order():
    config = fixture_config(vocab_size=64, num_layers=1)
    expected = {
        "embedding.weight": (64, 256),
        "unembedding.weight": (64, 256),
        "norm.scale": (256,),
        "block.0.attn.norm.scale": (256,),
        "block.0.attn.qkv.weight": (768, 256),
        "block.0.attn.qkv.bias": (768,),
        "block.0.attn.sinks": (8,),
        "block.0.attn.out.weight": (256, 512),
        "block.0.attn.out.bias": (256,),
        "block.0.mlp.norm.scale": (256,),
        "block.0.mlp.gate.weight": (8, 256),
        "block.0.mlp.gate.bias": (8,),
        "block.0.mlp.mlp1_weight.blocks": (8, 384, 8, 16),
        "block.0.mlp.mlp1_weight.scales": (8, 384, 8),
        "block.0.mlp.mlp1_bias": (8, 384),
        "block.0.mlp.mlp2_weight.blocks": (8, 256, 6, 16),
        "block.0.mlp.mlp2_weight.scales": (8, 256, 6),
        "block.0.mlp.mlp2_bias": (8, 256),
    }
    assert {name: spec.shape for name, spec in file_specs(config, original_spans(config)).items()} == expected
    first_rows = {part: original_spans(config)[f"model.layers.0.self_attn.{part}_proj.weight"].first for part in "qkv"}
    assert first_rows == {"q": 0, "k": 512, "v": 640}


def test_norms_may_be_kept_in_fp32(tiny, copy):
    edit(copy, lambda tensors, _: tensors.update({name: t.float() for name, t in tensors.items() if "norm" in name or "sinks" in name}))
    assert open_checkpoint(copy, tiny.config).tensor("model.norm.weight").dtype == torch.float32
