"""Reading `config.json` in each spelling, and refusing what is not gpt-oss or can't be cut, with all reasons at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.errors import ConfigError
from model.config import check_layout, load_model_config
from model.fixture import fixture_config

PUBLISHED_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
ORIGINAL_20B = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}
EXPECTED_20B = fixture_config(
    num_layers=24,
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    num_qo_heads=64,
    num_kv_heads=8,
)


def new_spelling() -> dict:
    tree = {name: value for name, value in PUBLISHED_20B.items() if name not in ("rope_scaling", "rope_theta", "experts_per_token")}
    return tree | {"rope_parameters": {**PUBLISHED_20B["rope_scaling"], "rope_theta": 150000.0}, "swiglu_alpha": 1.702}


def write(folder: Path, tree: object, generation: object = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tree))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("tree", [PUBLISHED_20B, new_spelling(), ORIGINAL_20B], ids=["rope_scaling", "rope_parameters", "original"])
def test_every_spelling_gives_the_same_config(tmp_path, tree):
    assert load_model_config(write(tmp_path, tree)) == EXPECTED_20B


def test_the_original_folder_is_found_below_the_checkpoint(tmp_path):
    write(tmp_path / "original", ORIGINAL_20B)
    assert load_model_config(tmp_path) == EXPECTED_20B


def test_layers_alternate_from_sliding_unless_the_config_says_otherwise(tmp_path):
    kinds = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
    tree = PUBLISHED_20B | {"num_hidden_layers": 4, "layer_types": kinds}
    assert load_model_config(write(tmp_path, tree)).sliding == (False, False, True, False)
    assert load_model_config(write(tmp_path, tree | {"layer_types": None})).sliding == (True, False, True, False)


@dataclass(frozen=True)
class EosCase:
    name: str
    named: object
    generation: object
    vocab_size: int
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    "case",
    [
        EosCase("config-alone-gets-call-too", 200002, None, 201088, (200002, 200012)),
        EosCase("nothing-named", None, None, 201088, (200002, 200012)),
        EosCase("generation-config-wins", 7, {"eos_token_id": [200002, 199999, 200012]}, 201088, (199999, 200002, 200012)),
        EosCase("small-vocabulary", 2, None, 1024, (2,)),
        EosCase("small-vocabulary-none", None, {"do_sample": True}, 1024, ()),
    ],
    ids=str,
)
def test_end_of_sequence_ids(tmp_path, case: EosCase):
    tree = PUBLISHED_20B | {"eos_token_id": case.named, "vocab_size": case.vocab_size}
    assert load_model_config(write(tmp_path, tree, case.generation)).eos_token_ids == case.expected


@dataclass(frozen=True)
class Refusal:
    name: str
    changes: dict
    reasons: tuple[str, ...]
    drop: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return self.name


ROPE = PUBLISHED_20B["rope_scaling"]


@pytest.mark.parametrize(
    "case",
    [
        Refusal("truncate", {"rope_scaling": ROPE | {"truncate": True}}, ("rope truncate is true",)),
        Refusal("rope-type", {"rope_scaling": ROPE | {"rope_type": "linear"}}, ("rope_type is 'linear'",)),
        Refusal("other-model", {"model_type": "llama"}, ("model_type is 'llama'",)),
        Refusal("no-bias", {"attention_bias": False}, ("attention_bias is false",)),
        Refusal("tied", {"tie_word_embeddings": True}, ("tie_word_embeddings is true",)),
        Refusal("heads", {"num_key_value_heads": 7}, ("64 query heads, 7 KV heads",)),
        Refusal("group", {"intermediate_size": 2881}, ("intermediate_size 2881 is not a multiple of 32",)),
        Refusal("layer-types", {"layer_types": ["sliding_attention"]}, ("layer_types: expected 24 entries",)),
        Refusal("layer-kind", {"layer_types": ["chunked"] * 24}, ("layer_types",)),
        Refusal("rope-not-object", {"rope_scaling": 3}, ("expected an object",)),
        Refusal("eos", {"eos_token_id": 201088}, ("eos_token_id is 201088",)),
        Refusal("nan", {"swiglu_limit": float("nan")}, ("swiglu_limit is nan",)),
        Refusal(
            "all-at-once",
            {"hidden_size": "2880", "num_local_experts": True, "vocab_size": 0, "rms_norm_eps": -1},
            ("hidden_size is '2880'", "num_local_experts is True", "vocab_size is 0", "rms_norm_eps is -1", "head_dim is missing"),
            drop=("head_dim",),
        ),
        Refusal(
            "all-inconsistencies-at-once",
            {"hidden_size": 100, "head_dim": 33, "num_experts_per_tok": 33},
            ("hidden_size 100", "head_dim 33 is odd", "33 of 32 experts"),
        ),
    ],
    ids=str,
)
def test_a_wrong_config_is_refused_with_every_reason(tmp_path, case: Refusal):
    tree = {name: value for name, value in PUBLISHED_20B.items() if name not in case.drop} | case.changes
    with pytest.raises(ConfigError) as refused:
        load_model_config(write(tmp_path, tree))
    for reason in case.reasons:
        assert reason in str(refused.value)
    assert str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_an_unreadable_config_is_refused_with_its_name(tmp_path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_model_config(tmp_path)


def test_kv_geometry_has_the_models_numbers():
    geometry = EXPECTED_20B.kv_geometry(32, "bfloat16")
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, geometry.block_size_tokens) == (24, 8, 64, 32)
    assert geometry.window_tokens == 128
    assert geometry.sliding == (True, False) * 12


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 8)])
def test_every_listed_layout_fits_the_published_model(tp: int, ep: int):
    check_layout(EXPECTED_20B, tp, ep)


@dataclass(frozen=True)
class LayoutRefusal:
    name: str
    tp: int
    ep: int
    size: dict
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize(
    "case",
    [
        LayoutRefusal("tp3", 3, 1, {}, ("tp is 3",)),
        LayoutRefusal("tp16", 16, 16, {}, ("tp is 16",)),
        LayoutRefusal("tp0", 0, 0, {}, ("tp is 0",)),
        LayoutRefusal("ep-between", 4, 2, {}, ("ep is 2",)),
        LayoutRefusal("ep-above", 2, 4, {}, ("ep is 4",)),
        LayoutRefusal(
            "everything",
            8,
            8,
            {"num_qo_heads": 12, "num_kv_heads": 3, "num_experts": 12, "vocab_size": 7},
            ("12 query heads", "3 KV heads and tp 8", "12 experts", "vocabulary of 7"),
        ),
    ],
    ids=str,
)
def test_a_layout_that_does_not_fit_is_refused_with_every_reason(case: LayoutRefusal):
    with pytest.raises(ConfigError) as refused:
        check_layout(fixture_config(**case.size), case.tp, case.ep)
    for reason in case.reasons:
        assert reason in str(refused.value)
