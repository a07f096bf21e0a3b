"""Writes the packed file that ships (its form and its expansion: `model/trained_fixture.py`), and checkpoints for further training.

Used by `train`, `evaluate` and `smoke`.
"""

import json
import lzma
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from model.trained_fixture import OFFICIAL_IDS, SIZES, VOCABULARY_TENSORS, read_packed
from tools.tiny_gpt_oss.mxfp4 import pack_mxfp4, unpack_mxfp4
from tools.tiny_gpt_oss.network import TinyConfig, TinyGptOss
from tools.tiny_gpt_oss.sample import DataError
from tools.tiny_gpt_oss.vocabulary import Vocabulary

_EXPERT_TENSORS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def _is_expert(name: str) -> bool:
    return name.endswith(_EXPERT_TENSORS)


def save_packed(path: Path, model: TinyGptOss, vocabulary: Vocabulary) -> None:
    """Writes the shipped file: experts to MXFP4, everything else rounded to bf16, kept vocabulary rows only."""
    tensors: dict[str, Tensor] = {OFFICIAL_IDS: torch.from_numpy(vocabulary.official_ids).to(torch.int32)}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if _is_expert(name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = pack_mxfp4(value)
        else:
            rows = vocabulary.num_rows if name in VOCABULARY_TENSORS else len(value)
            tensors[name] = value[:rows].bfloat16().contiguous()
    raw = save(tensors, metadata={SIZES: json.dumps(asdict(model.config))})
    path.write_bytes(lzma.compress(raw, preset=6))


def packed_state(model: TinyGptOss) -> dict[str, Tensor]:
    """The state that a packed file would hold, decoded to fp32."""
    state = {}
    for name, value in model.state_dict().items():
        rounded = unpack_mxfp4(*pack_mxfp4(value.detach().cpu())) if _is_expert(name) else value.bfloat16().float()
        state[name] = rounded.to(value.device)
    return state


def load_packed(path: Path) -> tuple[TinyGptOss, Tensor]:
    """(model over compact rows with fp32 copies of the packed weights, official ids of rows 1..)."""
    sizes, tensors = read_packed(path)
    model = TinyGptOss(TinyConfig(**sizes))
    state = model.state_dict()
    for name in state:
        if _is_expert(name):
            state[name] = unpack_mxfp4(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        else:
            state[name][: len(tensors[name])] = tensors[name].float()
    model.load_state_dict(state)
    return model.eval(), tensors[OFFICIAL_IDS]


def save_checkpoint(out: Path, model: TinyGptOss) -> None:
    """The unrounded weights for further training, in two files: experts in bf16, the rest in fp32."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    experts = {name: value.bfloat16() for name, value in state.items() if _is_expert(name)}
    save_file(experts, out / "checkpoint_experts.safetensors")
    save_file({k: v for k, v in state.items() if k not in experts}, out / "checkpoint_rest.safetensors")


def load_checkpoint(folder: Path, model: TinyGptOss) -> None:
    """Loads what `save_checkpoint` wrote into `model`."""
    state = {}
    for part in ("experts", "rest"):
        path = folder / f"checkpoint_{part}.safetensors"
        if not path.is_file():
            raise DataError(f"no {path}: give the folder of an earlier run")
        state |= {name: value.float() for name, value in load_file(path).items()}
    model.load_state_dict(state)
