"""The kept part of the 201,088-row vocabulary: official token ids to compact rows and back, and the bytes of each.

Row 0 is the unknown token: every official id that is not kept shares it. Reads and writes `vocabulary.json`;
plain Python and numpy, so it runs on the training machine. Called by everything that sees token ids.
"""

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from tools.tiny_gpt_oss.sample import DataError

FULL_VOCABULARY_ROWS = 201_088
UNKNOWN_ROW = 0
UNKNOWN_OFFICIAL_ID = 201_087  # a reserved id that no text has; stands for row 0 on the way back
SPECIAL_TEXT = {
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}


class Vocabulary:
    """Compact rows 1.. are `official_ids` in rising order; row 0 is the unknown token."""

    def __init__(self, official_ids: Sequence[int], texts: Sequence[bytes]) -> None:
        if list(official_ids) != sorted(set(official_ids)) or len(official_ids) != len(texts):
            raise DataError("official ids must rise strictly and have one text each")
        self.official_ids = np.asarray(official_ids, dtype=np.int64)
        self.texts = [b"<?>", *texts]
        self._row_of_id = np.zeros(FULL_VOCABULARY_ROWS, dtype=np.int64)
        self._row_of_id[self.official_ids] = np.arange(1, len(official_ids) + 1)

    @property
    def num_rows(self) -> int:
        return len(self.texts)

    @property
    def num_unused_ids(self) -> int:
        return FULL_VOCABULARY_ROWS - len(self.official_ids)

    def to_rows(self, official_ids: Sequence[int]) -> np.ndarray:
        return self._row_of_id[np.asarray(official_ids, dtype=np.int64)]

    def to_official(self, rows: Sequence[int]) -> list[int]:
        table = np.concatenate([[UNKNOWN_OFFICIAL_ID], self.official_ids])
        return table[np.asarray(rows, dtype=np.int64)].tolist()

    def decode(self, rows: Iterable[int]) -> str:
        return b"".join(self.texts[row] for row in rows).decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        texts = [base64.b64encode(text).decode() for text in self.texts[1:]]
        path.write_text(json.dumps({"official_ids": self.official_ids.tolist(), "texts": texts}))

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        raw = json.loads(path.read_text())
        return cls(raw["official_ids"], [base64.b64decode(text) for text in raw["texts"]])


def make_vocabulary(used_ids: Iterable[int], token_bytes: dict[int, bytes]) -> Vocabulary:
    """Keeps `used_ids` and the special tokens of the chat format."""
    kept = sorted((set(used_ids) | set(SPECIAL_TEXT)) - {UNKNOWN_OFFICIAL_ID})
    texts = [SPECIAL_TEXT[i].encode() if i in SPECIAL_TEXT else token_bytes[i] for i in kept]
    return Vocabulary(kept, texts)
