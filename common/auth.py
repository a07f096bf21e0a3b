"""Signs and checks the messages that may move or free KV, with the cluster's key.

A message is signed over its deterministic serialisation without the `mac` field. Comparison takes constant time.
"""

from __future__ import annotations

import hashlib
import hmac

from common.errors import Corrupted
from common.keyring import Key, ring_of


def sign(message, key: Key) -> None:
    """Fills `message.mac` with HMAC-SHA256 over the type's name and all other fields, by the current key."""
    message.mac = _mac(message, ring_of(key).current())


def verify(message, key: Key) -> None:
    """Raises: Corrupted if the mac fits none of the keys"""
    if not any(hmac.compare_digest(message.mac, _mac(message, one)) for one in ring_of(key).all()):
        raise Corrupted(f"{message.DESCRIPTOR.name}: bad signature; do both sides share cluster.key_file?")


def _mac(message, key: bytes) -> bytes:
    bare = type(message)()
    bare.CopyFrom(message)
    bare.ClearField("mac")
    data = message.DESCRIPTOR.full_name.encode() + b"\0" + bare.SerializeToString(deterministic=True)
    return hmac.new(key, data, hashlib.sha256).digest()
