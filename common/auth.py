"""Signs and checks the messages that may move or free KV, with the cluster's key.

A message is signed over its deterministic serialisation without the `mac` field. Comparison takes constant time.
"""

from __future__ import annotations

import hashlib
import hmac

from common.errors import KVTransferError


def sign(message, key: bytes) -> None:
    """Fills `message.mac` with HMAC-SHA256 over the type's name and all other fields."""
    message.mac = _mac(message, key)


def verify(message, key: bytes) -> None:
    """Raises: KVTransferError if the mac does not fit"""
    if not hmac.compare_digest(message.mac, _mac(message, key)):
        raise KVTransferError(f"{message.DESCRIPTOR.name}: bad signature; do both sides share cluster.key_file?")


def _mac(message, key: bytes) -> bytes:
    bare = type(message)()
    bare.CopyFrom(message)
    bare.ClearField("mac")
    data = message.DESCRIPTOR.full_name.encode() + b"\0" + bare.SerializeToString(deterministic=True)
    return hmac.new(key, data, hashlib.sha256).digest()
