"""What fits a decode group: memory of a cell and the largest batch, computed from the configuration and held against the running group.

Pure but for reading a checkpoint's configuration. The rules are the engine's own: blocks by `model/kv_memory.py`, admission by
`decode_worker/scheduler.py`. Called by `sweep.py` and the CLI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.profile import DecodeRoom, LargestBatch, RankMemory
from common.config import Config
from common.kv_layout import KVGeometry
from common.kv_proto import geometry_from_proto
from common.proto import types_pb2
from decode_worker.scheduler import blocks_of, largest_batch, sliding_pool_of
from model.config import load_model_config
from model.decode_memory import decode_memory
from model.kv_memory import block_bytes, full_blocks_in, full_blocks_of

Limit = Literal["max_batch", "KV blocks"]
MIB, GIB = 1 << 20, 1 << 30
GPU_GIB = {"H200": 139.8}  # as CUDA tells it: what the driver keeps is taken off


@dataclass(frozen=True)
class Planned:
    """What a group has by its configuration. `blocks`: KV blocks of its full layers, None if that takes a device's memory that is not
    known; `memory`: of one rank, likewise."""

    blocks: int | None
    memory: RankMemory | None


@dataclass(frozen=True)
class Admission:
    """What a running group did when it was asked for places until it refused one.

    Units: tokens: of each sequence, prompt and output; blocks, free_blocks: KV blocks of its full layers, in all and at the refusal
    """

    tokens: int
    blocks: int
    free_blocks: int
    admitted: int
    refusal: str


def planned_of(group: types_pb2.GroupDescription, config: Config, device_bytes: int | None) -> Planned | None:
    """What the pool of a decode group makes of it; None if there is no such pool.

    Units: device_bytes: all memory of one GPU; None if it is not known or the group runs on CPUs
    Raises: ConfigError if the checkpoint's configuration can't be read, or the model can't be cut this way
    """
    pool = next((pool for pool in config.pools if pool.name == group.pool and pool.role == "decode"), None)
    if pool is None:
        return None
    if device_bytes is None:
        return Planned(pool.kv_blocks, None)
    model = load_model_config(config.model.path)
    longest = min(config.model.max_model_len, model.max_position)
    found = decode_memory(
        model, tp=pool.layout.tp, ep=pool.layout.ep, weights=pool.weights, max_batch=pool.max_batch, max_positions=longest,
        device_bytes=device_bytes,
    )  # fmt: skip
    memory = RankMemory(
        device_bytes=found.device,
        process_bytes=found.process,
        weights_bytes=found.weights,
        step_bytes=found.step,
        margin_bytes=found.margin,
    )
    geometry = model.kv_geometry(config.kv.block_size, config.kv.dtype)
    room = full_blocks_in(found.kv, geometry, pool.layout.tp, sliding_pool_of(geometry, pool.max_batch))
    return Planned(full_blocks_of(room, pool.kv_blocks, pool.max_batch * geometry.blocks_for(longest)), memory)


def why_not(group: types_pb2.GroupDescription, batch: int, tokens: int) -> str:
    """Why a running decode group can't hold so many sequences of so many tokens, prompt and output; "" if it can."""
    geometry = geometry_from_proto(group.kv)
    blocks = group.capacity_tokens // geometry.block_size_tokens
    longest = min(group.max_model_len, group.capacity_tokens)
    if batch > group.max_batch:
        return f"its max_batch is {group.max_batch}"
    if tokens > longest:
        return f"sequences grow to {tokens:,} tokens while they are measured, the longest it takes has {longest:,}"
    if batch > largest_batch(geometry, blocks, group.max_batch, tokens):
        each = blocks_of(geometry, tokens)[0]
        return f"sequences grow to {tokens:,} tokens while they are measured: {batch} x {each:,} KV blocks are needed, it has {blocks:,}"
    return ""


def cell_bytes(group: types_pb2.GroupDescription, memory: RankMemory | None, batch: int, context_tokens: int) -> tuple[int, int | None]:
    """Of one rank: bytes of the KV blocks of a batch at this context, and all that it needs with them; None if that is not known."""
    kv_bytes = batch * _sequence_bytes(geometry_from_proto(group.kv), group.layout.tp, context_tokens)
    return kv_bytes, None if memory is None else memory.besides_kv + kv_bytes


def room_of(group: types_pb2.GroupDescription, planned: Planned | None, contexts: Sequence[int], found: Sequence[Admission]) -> DecodeRoom:
    """Computed and confirmed side by side, one line per context that the group's longest sequence allows."""
    geometry, blocks = geometry_from_proto(group.kv), planned.blocks if planned else None
    by_tokens = {admission.tokens: admission for admission in found}
    largest = []
    for tokens in contexts:
        computed = None if blocks is None else largest_batch(geometry, blocks, group.max_batch, tokens)
        admission = by_tokens.get(tokens)
        line = LargestBatch(
            context_tokens=tokens, computed=computed, computed_limit=None if computed is None else _limit(computed == group.max_batch)
        )
        if admission is not None:
            has_blocks = admission.free_blocks >= blocks_of(geometry, tokens)[0]
            about = {"confirmed": admission.admitted, "confirmed_limit": _limit(has_blocks), "refusal": admission.refusal}
            line = line.model_copy(update=about)
        largest.append(line)
    return DecodeRoom(
        kv_blocks_computed=blocks,
        kv_blocks_confirmed=found[0].blocks if found else None,
        max_batch=group.max_batch,
        memory=planned.memory if planned else None,
        largest=tuple(largest),
    )


def differences(room: DecodeRoom) -> list[str]:
    """Where the running group is not what its configuration makes it, in words; empty if all that was compared is equal."""
    pairs = [("KV blocks", room.kv_blocks_computed, room.kv_blocks_confirmed)]
    pairs += [(f"largest batch at {line.context_tokens:,} tokens", line.computed, line.confirmed) for line in room.largest]
    differ = [(what, a, b) for what, a, b in pairs if a is not None and b is not None and a != b]
    return [f"{what}: {a:,} computed, {b:,} confirmed ({b / max(a, 1) - 1:+.1%})" for what, a, b in differ]


def _limit(is_batch: bool) -> Limit:
    return "max_batch" if is_batch else "KV blocks"


def _sequence_bytes(geometry: KVGeometry, tp: int, tokens: int) -> int:
    return sum(count * size for count, size in zip(blocks_of(geometry, tokens), block_bytes(geometry, tp), strict=True))
