"""FP8 conversion: every weight accounted for, padding zero, the folder whole or absent, and refused when it no longer fits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import model.convert
from common.errors import ConfigError
from kernels.reference import fp8_dequant_blocks_ref, mxfp4_dequant_ref
from model.checkpoint import open_checkpoint
from model.convert import convert_checkpoint, converted_bytes, quantise_experts
from model.fixture import fixture_config, write_checkpoint
from model.fp8_folder import FOLDER, MANIFEST, layer_file, open_fp8_folder
from model.weights import load_shard
from tests.support.tiny_checkpoint import Tiny, write_chosen, write_tiny
from tests.support.tolerance import assert_same_bytes

ONE = 0x2  # nibble of 1.0


@pytest.fixture
def small(tmp_path: Path) -> Tiny:
    return write_tiny(tmp_path / "small", num_layers=2, num_experts=4, vocab_size=64)


def decoded(tiny: Tiny, layer: int, name: str) -> Tensor:
    prefix = f"model.layers.{layer}.mlp.experts.{name}_proj"
    return mxfp4_dequant_ref(tiny.tensors[prefix + "_blocks"], tiny.tensors[prefix + "_scales"])


def test_every_weight_is_written_and_exact_and_padding_is_zero(small):
    calls: list[tuple[int, int]] = []
    report = convert_checkpoint(small.path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]
    assert report.folder == small.path / FOLDER
    assert report.values == report.exact_values == 2 * 4 * (384 * 256 + 256 * 192)
    assert report.exact_fraction == 1.0
    for layer in range(2):
        tensors = load_file(report.folder / layer_file(layer))
        for name, rows, columns in (("gate_up", 384, 256), ("down", 256, 192)):
            values, scales = tensors[name + ".values"], tensors[name + ".scales"]
            assert values.dtype == torch.float8_e4m3fn
            assert values.shape == (4, 384 if name == "gate_up" else 256, 256)
            assert_same_bytes(fp8_dequant_blocks_ref(values, scales, rows, columns), decoded(small, layer, name))
            padding = values.float().clone()
            padding[:, :rows, :columns] = 0
            assert not padding.any()
            assert torch.equal(scales, torch.exp2(torch.log2(scales).round()))


@dataclass(frozen=True)
class Spread:
    """Two values in one 128x128 block, 2^`octaves` apart in scale, and how many of them FP8 keeps."""

    octaves: int
    nibble: int
    exact: int

    def __str__(self) -> str:
        return f"2^{self.octaves}-nibble{self.nibble:X}"


@pytest.mark.parametrize(
    "case", [Spread(0, 7, 2), Spread(12, 2, 2), Spread(15, 2, 2), Spread(16, 2, 1), Spread(15, 1, 1), Spread(40, 7, 1)], ids=str
)
def test_exact_values_are_counted_one_by_one(case: Spread):
    """With 1.0 as the largest value, scaled to 256, e4m3 goes down to 2^-9: 17 octaves below it, in steps of 2^-9."""
    blocks, scales = torch.zeros(1, 32, 2, 16, dtype=torch.uint8), torch.full((1, 32, 2), 127, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = ONE
    blocks[0, 31, 1, 7], scales[0, 31, 1] = case.nibble << 4, 127 - case.octaves - 2
    values, block_scales, exact = quantise_experts(blocks, scales, torch.device("cpu"))
    assert exact == 32 * 64 - 2 + case.exact
    back = fp8_dequant_blocks_ref(values, block_scales, 32, 64)[0]
    assert back[0, 0] == 1.0
    assert (back[31, 47] == mxfp4_dequant_ref(blocks, scales)[0, 31, 47]) == (case.exact == 2)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (4, 1), (8, 1), (4, 4)], ids=str)
def test_values_at_pad_and_shard_edges_keep_their_own_scale(tmp_path, layout: tuple[int, int]):
    """Intermediate 352 = 2.75 blocks of 128. A large value on each side of every edge, small ones everywhere else."""
    tp, ep = layout
    config = fixture_config(vocab_size=32, num_layers=1, hidden_size=160, intermediate_size=352, head_dim=8)
    down = torch.full((8, 160, 11, 16), ONE | ONE << 4, dtype=torch.uint8)
    scales = torch.full((8, 160, 11), 117, dtype=torch.uint8)
    edges = [column for edge in (32, 64, 96, 128, 256, 320, 352) for column in (edge - 1, edge) if column < 352]
    for column in edges:  # 2^10 times its neighbours, in one row
        scales[:, 7, column // 32] = 127
    gate_up = torch.full((8, 704, 5, 16), ONE | ONE << 4, dtype=torch.uint8)
    gate_up_scales = torch.full((8, 704, 5), 120, dtype=torch.uint8)
    gate_up_scales[:, [0, 127, 128, 255, 256, 511, 512, 703]] = 127
    tiny = write_chosen(
        tmp_path,
        config,
        {"down_proj_blocks": down, "down_proj_scales": scales, "gate_up_proj_blocks": gate_up, "gate_up_proj_scales": gate_up_scales},
    )
    convert_checkpoint(tmp_path)
    shards = [
        load_shard(tmp_path, config, tp=tp, ep=ep, rank=rank, device="cpu", dtype=torch.float32, weights="fp8").layers[0].experts
        for rank in range(tp)
    ]
    whole_experts = tp == ep
    assert_same_bytes(torch.cat([shard.down for shard in shards], 0 if whole_experts else 2), decoded(tiny, 0, "down"), layout)
    assert_same_bytes(torch.cat([shard.gate_up for shard in shards], 0 if whole_experts else 1), decoded(tiny, 0, "gate_up"), layout)


def test_the_published_size_has_23_scale_columns_and_45_scale_rows():
    config = fixture_config(num_layers=1, num_experts=1, hidden_size=2880, intermediate_size=2880)
    assert converted_bytes(config) == 2944 * (5760 + 2944) + 4 * 23 * (45 + 23)
    blocks, scales = torch.full((1, 2, 90, 16), 0x77, dtype=torch.uint8), torch.full((1, 2, 90), 127, dtype=torch.uint8)
    scales[0, 1, 88:] = 137  # columns 2816 to 2879: the last, half block
    values, block_scales, exact = quantise_experts(blocks, scales, torch.device("cpu"))
    assert block_scales.shape == (1, 1, 23)
    assert (block_scales[0, 0, :22] == block_scales[0, 0, 0]).all()
    assert block_scales[0, 0, 22] == block_scales[0, 0, 0] * 1024
    assert exact == 2 * 2880
    assert not values[0, :2, 2880:].float().any()


def test_a_current_conversion_is_left_alone_and_force_repeats_it(small):
    first = convert_checkpoint(small.path)
    stamp = (small.path / FOLDER / MANIFEST).stat().st_mtime_ns
    second = convert_checkpoint(small.path)
    assert (first.reused, second.reused) == (False, True)
    assert (second.values, second.exact_values, second.num_bytes) == (first.values, first.exact_values, first.num_bytes)
    assert (small.path / FOLDER / MANIFEST).stat().st_mtime_ns == stamp
    assert not convert_checkpoint(small.path, force=True).reused


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_conversion_leaves_nothing_behind_and_the_old_one_in_place(small, layer: int, monkeypatch):
    def interrupt(done: int, total: int) -> None:
        if done == layer + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(small.path, progress=interrupt)
    assert sorted(file.name for file in small.path.iterdir() if "fp8" in file.name) == []
    convert_checkpoint(small.path)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(small.path, force=True, progress=interrupt)
    assert convert_checkpoint(small.path).reused


def test_what_a_killed_run_left_is_neither_used_nor_in_the_way(small):
    convert_checkpoint(small.path)
    (small.path / FOLDER).rename(small.path / f"{FOLDER}.partial")
    with pytest.raises(ConfigError, match="tandem convert"):
        open_fp8_folder(small.path, small.config, open_checkpoint(small.path, small.config))
    assert not convert_checkpoint(small.path).reused
    assert sorted(file.name for file in small.path.iterdir() if "fp8" in file.name) == [FOLDER]


def _rewrite_checkpoint(folder: Path) -> None:
    write_tiny(folder, num_layers=2, num_experts=4, vocab_size=64, seed=1)


def _drop_an_expert(folder: Path) -> None:
    tensors = load_file(folder / FOLDER / layer_file(1))
    save_file({name: t[:3].contiguous() for name, t in tensors.items()}, folder / FOLDER / layer_file(1))


@dataclass(frozen=True)
class Damage:
    name: str
    make: Callable[[Path], object]
    reason: str

    def __str__(self) -> str:
        return self.name


DAMAGES = [
    Damage("no-manifest", lambda folder: (folder / FOLDER / MANIFEST).unlink(), "manifest.json is missing"),
    Damage("broken-manifest", lambda folder: (folder / FOLDER / MANIFEST).write_text("{}"), "manifest.json can't be read"),
    Damage(
        "other-format",
        lambda folder: (folder / FOLDER / MANIFEST).write_text(
            (folder / FOLDER / MANIFEST).read_text().replace('"format": 1', '"format": 0')
        ),
        "format 0, this version reads 1",
    ),
    Damage("missing-layer", lambda folder: (folder / FOLDER / layer_file(1)).unlink(), "layer-00001.safetensors: No such file"),
    Damage("truncated-layer", lambda folder: os.truncate(folder / FOLDER / layer_file(0), 5000), "layer-00000.safetensors: truncated"),
    Damage("other-shape", _drop_an_expert, "layer-00001.safetensors holds"),
    Damage("checkpoint-changed", _rewrite_checkpoint, "has changed since"),
    Damage("no-folder", lambda folder: shutil.rmtree(folder / FOLDER), "not there"),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_or_stale_conversion_is_refused_and_converted_again(small, damage: Damage):
    convert_checkpoint(small.path)
    damage.make(small.path)
    with pytest.raises(ConfigError) as refused:
        load_shard(small.path, small.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="fp8")
    assert damage.reason in str(refused.value)
    assert f"run `tandem convert {small.path}`" in str(refused.value)
    assert not convert_checkpoint(small.path).reused
    load_shard(small.path, small.config, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="fp8")


def test_a_copy_with_other_times_is_still_current(small, tmp_path):
    convert_checkpoint(small.path)
    shutil.copytree(small.path, tmp_path / "copy", copy_function=shutil.copyfile)
    assert convert_checkpoint(tmp_path / "copy").reused


def test_the_original_layout_converts_to_the_same_bytes(small, tmp_path):
    write_checkpoint(tmp_path / "openai", small.config, small.tensors, layout="original")
    for path in (small.path, tmp_path / "openai"):
        convert_checkpoint(path)
    for layer in range(2):
        files = [(path / FOLDER / layer_file(layer)).read_bytes() for path in (small.path, tmp_path / "openai")]
        assert files[0] == files[1]


def test_a_full_disk_is_told_before_work_starts(small, monkeypatch):
    monkeypatch.setattr(model.convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 1000, 0))
    with pytest.raises(ConfigError, match="FP8 weights take"):
        convert_checkpoint(small.path)
    assert not (small.path / f"{FOLDER}.partial").exists()


def test_a_second_conversion_at_the_same_time_is_refused(small):
    def second(done: int, total: int) -> None:
        with pytest.raises(ConfigError, match="another conversion"):
            convert_checkpoint(small.path)

    assert not convert_checkpoint(small.path, progress=second).reused
