"""Token id -> bytes, read from an `o200k_base.tiktoken` file; no tokenizer library needed.

Used by the workers to match stop strings. Encoding text is the frontend's work, not done here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from functools import cached_property
from pathlib import Path

from common.errors import ConfigError

VOCAB_FILE = "o200k_base.tiktoken"
VOCAB_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


class TokenBytes:
    """The bytes of every ordinary token. The file is read at the first look-up (about 0.3 s), so starting costs nothing.

    Ids without an entry (special and reserved tokens) are control tokens: they have no text.
    """

    def __init__(self, folder: Path):
        self._path = folder / VOCAB_FILE

    def of(self, token_id: int) -> bytes | None:
        """Returns: the token's bytes; None for a control token

        Raises: as `load`, at the first call
        """
        return self._table.get(token_id)

    def load(self) -> TokenBytes:
        """Reads and checks the file now, so that no request waits for it. Returns: itself

        Raises: ConfigError if the file is missing or not the o200k vocabulary
        """
        self.of(0)
        return self

    @cached_property
    def _table(self) -> dict[int, bytes]:
        try:
            raw = self._path.read_bytes()
        except OSError as exc:
            raise ConfigError(f"model.vocab: {self._path} can't be read: {exc.strerror}") from exc
        return _parse(raw, self._path)


def _parse(raw: bytes, path: Path) -> dict[int, bytes]:
    found = hashlib.sha256(raw).hexdigest()
    if found != VOCAB_SHA256:
        raise ConfigError(f"model.vocab: {path} is not the o200k vocabulary: sha256 {found}, expected {VOCAB_SHA256}")
    table = {}
    for line in raw.splitlines():
        token, _, rank = line.partition(b" ")
        try:
            table[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error) as exc:
            raise ConfigError(f"model.vocab: {path}: broken line {line[:40]!r}") from exc
    return table
