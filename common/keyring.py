"""The cluster's keys: the first one signs, all of them verify, so that a key can be replaced while everything runs.

A key file holds one key per line. To rotate: add the new key as the second line everywhere, then move it to the first, then drop the old.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, KVTransferError
from common.watched import Watched, read_file

MIN_KEY_BYTES = 16


class Keyring:
    """Keys in the order of the file. Any thread may ask."""

    def __init__(self, keys: Sequence[bytes] | Watched[tuple[bytes, ...]]):
        self._keys = keys if isinstance(keys, Watched) else tuple(keys)

    @classmethod
    def of_file(cls, path: Path) -> Keyring:
        """Follows the file. Raises: ConfigError if it can't be read or holds no usable key"""
        return cls(Watched([path], lambda: _parse(path)))

    def all(self) -> tuple[bytes, ...]:
        return self._keys.get() if isinstance(self._keys, Watched) else self._keys

    def current(self) -> bytes:
        return self.all()[0]

    def by_id(self, key_id: int) -> bytes:
        """Raises: KVTransferError if no such key is here (any more)"""
        for key in self.all():
            if id_of(key) == key_id:
                return key
        raise KVTransferError(f"no key {key_id:08x} here; do both sides share cluster.key_file?")

    def tokens(self) -> tuple[str, ...]:
        """What processes of the cluster show each other on gRPC calls, by key."""
        return tuple(hmac.digest(key, b"tandem internal token 1", hashlib.sha256).hex() for key in self.all())


Key = bytes | Keyring  # a fixed one, or those of a file


def ring_of(key: Key) -> Keyring:
    return key if isinstance(key, Keyring) else Keyring((key,))


def id_of(key: bytes) -> int:
    """32 bits that name a key and tell nothing else of it."""
    return int.from_bytes(hmac.digest(key, b"tandem key id 1", hashlib.sha256)[:4], "little")


def digest_secret(key: Key, key_id: int) -> bytes:
    """The key that both ends of a transfer make digests with. 0: the current one, for peers that name none.

    Raises: KVTransferError if it is not here
    """
    return ring_of(key).by_id(key_id) if key_id else ring_of(key).current()


def _parse(path: Path) -> tuple[bytes, ...]:
    keys = tuple(line.strip() for line in read_file(path, "key file").splitlines() if line.strip())
    if not keys or min(map(len, keys)) < MIN_KEY_BYTES:
        raise ConfigError(f"key file {path}: expected one key of at least {MIN_KEY_BYTES} bytes per line; `openssl rand -hex 32` makes one")
    return keys
