"""Who may call: bearer keys from a file or the environment, with a priority and a limit of running requests per key.

Owns the check of a request's key and the count of what a key has running. Keys are kept as digests only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import ConfigError, OverloadedError
from frontend.http.errors import HttpError

KEYS_ENV = "TANDEM_API_KEYS"  # keys separated by commas, all with the defaults


class KeyEntry(BaseModel):
    """One entry of the keys file, a YAML list. `max_running`: requests at once; `priority`: as in the router."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    key: str = Field(min_length=8)
    name: str = ""
    priority: int = Field(0, ge=-100, le=100)
    max_running: int | None = Field(None, ge=1)


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request. `priority` of its requests unless they ask for less, or for more up to `max_priority`."""

    name: str = "anonymous"
    priority: int = 0
    max_priority: int = 100
    max_running: int | None = None

    def priority_for(self, wanted: int | None) -> int:
        """Priority of a request that asks for `wanted`."""
        return self.priority if wanted is None else min(wanted, self.max_priority)


class Keys:
    """The keys of one frontend; none at all let everybody in."""

    def __init__(self, entries: tuple[KeyEntry, ...]):
        self._callers = {
            _digest(entry.key): Caller(entry.name or f"key-{number}", entry.priority, entry.priority, entry.max_running)
            for number, entry in enumerate(entries)
        }
        self._running: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        """Everybody may call."""
        return not self._callers

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who calls. Raises: HttpError 401 if the key is missing or unknown."""
        if self.is_open:
            return Caller()
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise HttpError(401, "no API key; send Authorization: Bearer KEY", code="missing_api_key")
        caller = self._callers.get(_digest(key.strip()))  # of digests, so that timing tells nothing about a key
        if caller is None:
            raise HttpError(401, "unknown API key", code="invalid_api_key")
        return caller

    @contextlib.contextmanager
    def running(self, caller: Caller) -> Iterator[None]:
        """Counts a request while it runs. Raises: OverloadedError if the caller has too many."""
        count = self._running.get(caller.name, 0)
        if caller.max_running is not None and count >= caller.max_running:
            raise OverloadedError(f"{caller.name} has {count} requests running, at most {caller.max_running} are allowed")
        self._running[caller.name] = count + 1
        try:
            yield
        finally:
            self._running[caller.name] -= 1


def load_keys(path: Path | None) -> Keys:
    """Keys from the file, else from the environment variable TANDEM_API_KEYS, else none.

    Raises: ConfigError naming the file and the entry; never with a key in its text.
    """
    if path is None:
        listed = [key.strip() for key in os.environ.get(KEYS_ENV, "").split(",") if key.strip()]
        return Keys(_entries([{"key": key} for key in listed], KEYS_ENV))
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"keys file {path} can't be read: {exc}") from exc
    except yaml.YAMLError:
        raise ConfigError(f"keys file {path} is not valid YAML") from None
    if not isinstance(tree, list) or not tree:
        raise ConfigError(f"keys file {path} must be a list of entries like {{key: ..., name: ..., priority: 0}}")
    return Keys(_entries(tree, str(path)))


def _entries(tree: list[Any], where: str) -> tuple[KeyEntry, ...]:
    entries = []
    for number, item in enumerate(tree):
        try:
            entries.append(KeyEntry.model_validate(item))
        except ValidationError as exc:
            first = exc.errors(include_input=False)[0]
            raise ConfigError(f"{where}, entry {number}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    return tuple(entries)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
