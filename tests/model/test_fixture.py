"""The random checkpoint's numbers, as they were computed with transformers from the same seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model.config import load_model_config
from model.fixture import dense_tensors, fixture_config, random_tensors, write_random_fixture
from model.gpt_oss import GptOss
from model.parallel import LocalGroup
from model.weights import load_shard
from tests.support.paged_run import PagedRun, greedy
from tests.support.tolerance import assert_same_bytes

IDS = np.random.default_rng(7).integers(3, 1000, size=(1, 200))[0].tolist()


@dataclass(frozen=True)
class Known:
    """What transformers 5.24 gave in fp32 for IDS. `sums`: of all logits, of their magnitudes, their maximum."""

    vocab_size: int
    parameters: int
    weights_sha256: str
    sums: tuple[float, float, float]
    last_sum: float
    last_top3: tuple[tuple[int, float], ...]
    last_6: tuple[float, ...]
    first_4: tuple[float, ...]
    argmax_sha1: str
    greedy_after_16: tuple[int, ...]
    greedy_after_150: tuple[int, ...]

    def __str__(self) -> str:
        return f"V{self.vocab_size}"


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


SMALL = Known(
    vocab_size=1024,
    parameters=6_588_736,
    weights_sha256="fb4dda415ac49563",
    sums=(1400.626667, 395113.928389, 10.185284),
    last_sum=81.043340,
    last_top3=((774, 7.9611), (106, 6.5247), (80, 6.0235)),
    last_6=(3.17419, 2.73947, -1.31836, 2.36634, 2.77282, 1.91995),
    first_4=(-2.37105, 2.09788, 0.8872, -1.32388),
    argmax_sha1="9f356b3380d3d1a3",
    greedy_after_16=ids(
        "930 346 615 409 252 232 421 954 347 858 388 331 121 340 785 1009 946 355 819 1011 153 712 143 957 990 619 230 180 340 608 912 166"
    ),
    greedy_after_150=ids("124 880 406 544 311 958 212 876 263 121 630 870 430 305 86 611"),
)
FULL_VOCABULARY = Known(
    vocab_size=201088,
    parameters=109_021_504,
    weights_sha256="cdf347a16741ee96",
    sums=(3627.875868, 76691602.747067, 12.888762),
    last_sum=-632.511687,
    last_top3=((183850, 11.8216), (178324, 10.6455), (139257, 10.2604)),
    last_6=(-0.66257, -0.6519, -3.5351, 3.47955, -1.81355, 0.94379),
    first_4=(-0.07575, 3.38784, -4.00305, -2.0428),
    argmax_sha1="1ea84431bc6a4118",
    greedy_after_16=ids("122990 48665 93538 168777 29207 27098 82741 185399"),
    greedy_after_150=ids("29711 60970 79642 153818 54139 22591 86518 24796 190563 45277 193260 92565 57139 61979 157086 178778"),
)
KNOWN = [SMALL, pytest.param(FULL_VOCABULARY, marks=pytest.mark.slow)]


def sha256_of(dense: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(dense):
        digest.update(name.encode() + dense[name].contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_weights_are_those_that_the_numbers_belong_to(known: Known):
    config = fixture_config(vocab_size=known.vocab_size)
    dense = dense_tensors(config, random_tensors(config))
    assert sum(tensor.numel() for tensor in dense.values()) == known.parameters
    assert sha256_of(dense) == known.weights_sha256


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("known", KNOWN, ids=str)
def test_the_checkpoint_on_disk_gives_the_known_logits_and_tokens(tmp_path, known: Known, layout):
    config = write_random_fixture(tmp_path, vocab_size=known.vocab_size, layout=layout)
    read = load_model_config(tmp_path)
    weights = load_shard(tmp_path, read, tp=1, ep=1, rank=0, device="cpu", dtype=torch.float32, weights="mxfp4")
    model = GptOss(read, weights, LocalGroup(), "cpu")
    logits = PagedRun(config, model).step([IDS]).double()
    scale = known.vocab_size / 1024
    assert (logits.sum().item(), logits.abs().sum().item()) == pytest.approx(known.sums[:2], abs=0.05 * scale)
    assert logits.max().item() == pytest.approx(known.sums[2], abs=1e-4)
    assert logits[-1].sum().item() == pytest.approx(known.last_sum, abs=2e-3 * scale)
    top = logits[-1].topk(3)
    assert top.indices.tolist() == [token for token, _ in known.last_top3]
    assert top.values.tolist() == pytest.approx([value for _, value in known.last_top3], abs=2e-4)
    assert logits[-1, :6].tolist() == pytest.approx(known.last_6, abs=1e-4)
    assert logits[0, :4].tolist() == pytest.approx(known.first_4, abs=1e-4)
    assert hashlib.sha1(logits.argmax(-1).numpy().astype("<i4").tobytes()).hexdigest()[:16] == known.argmax_sha1
    run = PagedRun(config, model, num_sequences=2, max_tokens=200)
    after_16, after_150 = greedy(run, [IDS[:16], IDS[:150]], max(len(known.greedy_after_16), len(known.greedy_after_150)))
    assert tuple(after_16[: len(known.greedy_after_16)]) == known.greedy_after_16
    assert tuple(after_150[: len(known.greedy_after_150)]) == known.greedy_after_150


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize(
    "size", [{"num_kv_heads": 8}, {"num_layers": 3, "num_experts": 16, "vocab_size": 200500, "hidden_size": 32}], ids=str
)
def test_the_config_that_is_written_is_the_one_that_is_read(tmp_path, size: dict, layout):
    written = write_random_fixture(tmp_path, layout=layout, **({"vocab_size": 512} | size))
    read = load_model_config(tmp_path)
    if (
        layout == "original" and written.vocab_size == 512
    ):  # that layout names no end of sequence, and a small vocabulary has none of its own
        assert read == replace(written, eos_token_ids=())
    else:
        assert read == written


@pytest.mark.parametrize(("num_shards", "with_index", "files"), [(1, None, 1), (1, True, 2), (3, None, 4)])
def test_shards_and_index(tmp_path, num_shards: int, with_index: bool | None, files: int):
    write_random_fixture(tmp_path, vocab_size=64, num_layers=1, num_shards=num_shards, with_index=with_index)
    assert len(list(tmp_path.glob("model*"))) == files


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_random_fixture(tmp_path / name, vocab_size=64, num_layers=1, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_kv_heads_change_only_the_tensors_of_kv_heads():
    first, second = (random_tensors(fixture_config(vocab_size=64, num_layers=1, num_kv_heads=heads)) for heads in (2, 8))
    assert_same_bytes(first["lm_head.weight"], second["lm_head.weight"])
    assert first["model.layers.0.self_attn.k_proj.weight"].shape == (128, 256)
    assert second["model.layers.0.self_attn.k_proj.weight"].shape == (512, 256)
