"""Reading and writing of the prepared data: token shards for training, decisions for evaluation.

A shard is an xz-compressed npz of flat arrays (rows, kinds, tasks, lengths). Owns the file formats only. Written by
`prepare`, read by `train` and `evaluate`; numpy alone.
"""

import io
import json
import lzma
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tools.tiny_gpt_oss.sample import DataError

IGNORED, PROMPT, TARGET = 0, 1, 2


@dataclass(frozen=True)
class TokenDocs:
    """Conversations end to end. rows uint16 [T], kinds uint8 [T], lengths int32 [N], tasks uint8 [N]."""

    rows: np.ndarray
    kinds: np.ndarray
    lengths: np.ndarray
    tasks: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)[:-1]]).astype(np.int64)


@dataclass(frozen=True)
class Example:
    """One decision of a held-out conversation, in official token ids."""

    task: str
    effort: str
    prompt: list[int]
    gold: list[int]
    values: list[str]


def write_docs(path: Path, docs: TokenDocs) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, rows=docs.rows, kinds=docs.kinds, lengths=docs.lengths, tasks=docs.tasks)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=4))


def read_docs(path: Path) -> TokenDocs:
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False) as arrays:
        return TokenDocs(**{name: arrays[name] for name in ("rows", "kinds", "lengths", "tasks")})


def read_all_docs(folder: Path) -> TokenDocs:
    """All shards train_*.npz.xz of the folder as one."""
    paths = sorted(folder.glob("train_*.npz.xz"))
    if not paths:
        raise DataError(f"no train_*.npz.xz in {folder}: run `python -m tools.tiny_gpt_oss.prepare` first")
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(read_docs, paths))
    return TokenDocs(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("rows", "kinds", "lengths", "tasks")))


def write_examples(path: Path, examples: list[Example]) -> None:
    lines = "\n".join(json.dumps(asdict(example)) for example in examples)
    path.write_bytes(lzma.compress(lines.encode(), preset=4))


def read_examples(path: Path) -> list[Example]:
    return [Example(**json.loads(line)) for line in lzma.decompress(path.read_bytes()).decode().split("\n")]
