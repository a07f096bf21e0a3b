"""The packer: MXFP4 bytes are exact, and an expanded folder says what the packed file says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from model.trained_fixture import expand
from tools.tiny_gpt_oss.mxfp4 import fake_quantise, pack_mxfp4, quantise, unpack_mxfp4
from tools.tiny_gpt_oss.network import TinyConfig, TinyGptOss
from tools.tiny_gpt_oss.pack import load_checkpoint, load_packed, packed_state, save_checkpoint, save_packed
from tools.tiny_gpt_oss.sample import DataError
from tools.tiny_gpt_oss.vocabulary import FULL_VOCABULARY_ROWS, UNKNOWN_OFFICIAL_ID, make_vocabulary

USED = [0, 7, 220, 5000, 200001]


@pytest.fixture
def model() -> TinyGptOss:
    torch.manual_seed(5)
    config = TinyConfig(len(USED) + 9, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    return TinyGptOss(config)


def vocabulary():
    return make_vocabulary(USED, {i: str(i).encode() for i in USED})


def test_mxfp4_bytes_decode_to_known_values() -> None:
    blocks = torch.zeros(1, 16, dtype=torch.uint8)
    blocks[0, 0], blocks[0, 1] = 0x21, 0xF8
    values = unpack_mxfp4(blocks, torch.tensor([127], dtype=torch.uint8))
    assert values[:4].tolist() == [0.5, 1.0, 0.0, -6.0]
    assert unpack_mxfp4(blocks, torch.tensor([126], dtype=torch.uint8))[1].item() == 0.5


@pytest.mark.parametrize("shape", [(32,), (3, 96), (2, 5, 64)])
def test_mxfp4_pack_and_unpack_are_exact(shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    weight = torch.randn(shape) * torch.exp2(torch.randint(-20, 20, (*shape[:-1], 1)))
    rounded = unpack_mxfp4(*pack_mxfp4(weight))
    assert torch.equal(rounded, quantise(weight))
    assert torch.equal(quantise(rounded), rounded)
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert (rounded - weight).abs().max() <= weight.abs().max() / 4


def test_mxfp4_of_zeros_is_zero() -> None:
    assert torch.equal(unpack_mxfp4(*pack_mxfp4(torch.zeros(2, 32))), torch.zeros(2, 32))


def test_mxfp4_refuses_a_ragged_axis() -> None:
    with pytest.raises(DataError, match="multiple of 32"):
        pack_mxfp4(torch.zeros(2, 33))


def test_fake_quantise_passes_the_gradient_straight_through() -> None:
    weight = torch.randn(2, 32, requires_grad=True)
    off, on = (fake_quantise(weight, torch.tensor(share)) for share in (0.0, 1.0))
    assert torch.equal(off, weight)
    torch.testing.assert_close(on, quantise(weight.detach()), rtol=1e-6, atol=1e-6)
    on.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_packed_file_round_trip(model: TinyGptOss, tmp_path: Path) -> None:
    save_packed(tmp_path / "p.xz", model, vocabulary())
    loaded, ids = load_packed(tmp_path / "p.xz")
    assert ids.tolist() == vocabulary().official_ids.tolist()
    rows = vocabulary().num_rows
    for name, value in packed_state(model).items():
        got = loaded.state_dict()[name]
        is_row_table = "embed" in name or "lm_head" in name
        assert torch.equal(got[:rows] if is_row_table else got, value[:rows] if is_row_table else value), name


def test_expanded_folder_has_all_rows_and_an_index(model: TinyGptOss, tmp_path: Path) -> None:
    save_packed(tmp_path / "p.xz", model, vocabulary())
    expand(tmp_path / "p.xz", tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(index.values())):
        tensors |= load_file(tmp_path / "out" / file)
    assert sorted(tensors) == sorted(index)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        table = tensors[name]
        source = model.state_dict()[name].bfloat16()
        assert table.shape == (FULL_VOCABULARY_ROWS, 32)
        assert torch.equal(table[USED[3]], source[vocabulary().to_rows([USED[3]])[0]])
        assert torch.equal(table[0], source[1])
        for unused in (6, 199_000, UNKNOWN_OFFICIAL_ID):
            assert torch.equal(table[unused], source[0])
    gate_up = "model.layers.1.mlp.experts.gate_up_proj"
    assert tensors[f"{gate_up}_blocks"].shape == (8, 128, 1, 16)
    assert tensors[f"{gate_up}_scales"].dtype == torch.uint8
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["intermediate_size"]) == (FULL_VOCABULARY_ROWS, 64)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.xz").write_bytes(b"not a packed file")
    with pytest.raises(ConfigError, match="not a packed"):
        expand(tmp_path / "p.xz", tmp_path / "out")


def test_checkpoint_round_trip_keeps_the_weights(model: TinyGptOss, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, model)
    fresh = TinyGptOss(model.config)
    load_checkpoint(tmp_path, fresh)
    for name, value in model.state_dict().items():
        want = value.bfloat16().float() if name.endswith(("gate_up_proj", "down_proj")) else value
        assert torch.equal(fresh.state_dict()[name], want), name
