"""How many KV blocks a group has: agreed by its ranks at start, from the smallest rank's memory, and never changed afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from common.errors import ConfigError
from common.kv_layout import KVGeometry, head_range
from common.process import identity
from common.proto import plan_pb2
from common.rank_spec import RankSpec
from model.control import FollowerChannel
from model.group import GroupLinks

logger = logging.getLogger(__name__)
GPU_MARGIN_BYTES = 3 << 30  # libraries' workspaces, graphs, staging of transfers, and what splitting attention takes with the pool's size
_MOST_CPU_BYTES = 256 << 20  # a CPU group is for trying out; touching memory costs seconds per GiB


def agree_on_memory(
    spec: RankSpec,
    links: GroupLinks,
    geometry: KVGeometry,
    *,
    sliding_blocks: int,
    useful_full_blocks: int,
    leader_address: str,
    step_bytes: int = 0,
) -> plan_pb2.GroupFacts:
    """Every rank calls it once its weights are loaded; only the leader's `leader_address` counts.

    Units: useful_full_blocks: more than this many are never asked for; step_bytes: device memory that the forward pass will still take
    Returns: the same on all ranks
    Raises: ConfigError if memory does not hold the blocks of one sequence, or on a GPU not those that `kv_blocks` asks for
    """
    hello = plan_pb2.RankHello(process=identity(), kv_bytes=free_kv_bytes(spec, step_bytes))
    if isinstance(links.control, FollowerChannel):
        links.control.reply(hello.SerializeToString())
        return plan_pb2.GroupFacts.FromString(links.control.receive())
    hellos = [hello, *map(plan_pb2.RankHello.FromString, links.control.collect())]
    kv_bytes = min(h.kv_bytes for h in hellos)
    room = full_blocks_in(kv_bytes, geometry, spec.tp, sliding_blocks)
    full_blocks = full_blocks_of(room, spec.kv_blocks, useful_full_blocks)
    if spec.device != "cpu" and full_blocks > room:
        raise ConfigError(
            f"pool {spec.pool}: kv_blocks {full_blocks} and {sliding_blocks} sliding blocks don't fit into "
            f"{kv_bytes} bytes a rank, which leave room for {room}"
        )
    if full_blocks < 1:
        raise ConfigError(f"pool {spec.pool}: {kv_bytes} bytes of memory hold no KV; set kv_blocks or lower max_batch")
    facts = plan_pb2.GroupFacts(full_blocks=full_blocks, sliding_blocks=sliding_blocks, leader_address=leader_address)
    facts.ranks.extend(h.process for h in hellos)
    links.control.send(facts.SerializeToString())
    logger.info("KV: %d full and %d sliding blocks of %d tokens", full_blocks, sliding_blocks, geometry.block_size_tokens)
    return facts


def block_bytes(geometry: KVGeometry, tp: int) -> tuple[int, int]:
    """Bytes that one block of the full layers takes on a rank, and one of the sliding layers."""
    layer_block_bytes = 2 * head_range(geometry.num_kv_heads, tp, 0).count * geometry.head_block_bytes
    return len(geometry.full_layers) * layer_block_bytes, len(geometry.sliding_layers) * layer_block_bytes


def full_blocks_in(kv_bytes: int, geometry: KVGeometry, tp: int, sliding_blocks: int) -> int:
    """Full-layer blocks that a rank's KV memory holds beside the sliding ones."""
    full_bytes, sliding_bytes = block_bytes(geometry, tp)
    return max(0, kv_bytes - sliding_blocks * sliding_bytes) // max(full_bytes, 1)


def full_blocks_of(room: int, kv_blocks: int | None, useful_full_blocks: int) -> int:
    """How many a group has where `room` of them fit: what its pool asks for, else all that can be used."""
    return kv_blocks or min(room, useful_full_blocks)


def free_kv_bytes(spec: RankSpec, step_bytes: int) -> int:
    """Memory that this rank may give to KV, once its weights are loaded: on a GPU what is free but for the forward pass's buffers and a
    margin; on a CPU an eighth of what its host has available for the group, within reason."""
    if spec.device != "cpu":
        free_bytes, _ = torch.cuda.mem_get_info(torch.device(spec.device))
        return max(0, free_bytes - step_bytes - GPU_MARGIN_BYTES)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024 // 8 // spec.tp, _MOST_CPU_BYTES)
    raise ConfigError("/proc/meminfo has no MemAvailable line; set kv_blocks")
