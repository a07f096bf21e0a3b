"""KVGeometry to and from its message."""

from __future__ import annotations

from common.kv_layout import KVGeometry
from common.proto import types_pb2


def geometry_to_proto(geometry: KVGeometry) -> types_pb2.KVGeometry:
    return types_pb2.KVGeometry(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size_tokens=geometry.block_size_tokens,
        dtype=geometry.dtype,
        window_tokens=geometry.window_tokens,
        sliding=geometry.sliding,
    )


def geometry_from_proto(message: types_pb2.KVGeometry) -> KVGeometry:
    return KVGeometry(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size_tokens=message.block_size_tokens,
        dtype=message.dtype,
        window_tokens=message.window_tokens,
        sliding=tuple(message.sliding),
    )
