"""How many KV blocks a group has: agreed by its ranks at start, from the smallest rank's memory, and never changed afterwards."""

from __future__ import annotations

import logging
from pathlib import Path

from common.errors import ConfigError
from common.kv_layout import KVGeometry, head_range
from common.process import identity
from common.proto import plan_pb2
from common.rank_spec import RankSpec
from model.control import FollowerChannel
from model.group import GroupLinks

logger = logging.getLogger(__name__)
_MOST_CPU_BYTES = 256 << 20  # a CPU group is for trying out; touching memory costs seconds per GiB


def agree_on_memory(
    spec: RankSpec, links: GroupLinks, geometry: KVGeometry, *, sliding_blocks: int, useful_full_blocks: int, leader_address: str
) -> plan_pb2.GroupFacts:
    """Every rank calls it once its weights are loaded; only the leader's `leader_address` counts.

    Units: useful_full_blocks: more than this many are never asked for
    Returns: the same on all ranks
    Raises: ConfigError if memory does not hold the blocks of one sequence
    """
    hello = plan_pb2.RankHello(process=identity(), kv_bytes=free_kv_bytes(spec))
    if isinstance(links.control, FollowerChannel):
        links.control.reply(hello.SerializeToString())
        return plan_pb2.GroupFacts.FromString(links.control.receive())
    hellos = [hello, *map(plan_pb2.RankHello.FromString, links.control.collect())]
    heads = head_range(geometry.num_kv_heads, spec.tp, 0).count
    layer_block_bytes = 2 * heads * geometry.head_block_bytes
    left = min(h.kv_bytes for h in hellos) - sliding_blocks * len(geometry.sliding_layers) * layer_block_bytes
    full_block_bytes = len(geometry.full_layers) * layer_block_bytes
    full_blocks = spec.kv_blocks or min(left // max(full_block_bytes, 1), useful_full_blocks)
    if full_blocks < 1:
        raise ConfigError(
            f"pool {spec.pool}: {min(h.kv_bytes for h in hellos)} bytes of memory hold no KV; set kv_blocks or lower max_batch"
        )
    facts = plan_pb2.GroupFacts(full_blocks=full_blocks, sliding_blocks=sliding_blocks, leader_address=leader_address)
    facts.ranks.extend(h.process for h in hellos)
    links.control.send(facts.SerializeToString())
    logger.info("KV: %d full and %d sliding blocks of %d tokens", full_blocks, sliding_blocks, geometry.block_size_tokens)
    return facts


def free_kv_bytes(spec: RankSpec) -> int:
    """Memory that this rank may give to KV: on a CPU an eighth of what its host has available for the group, within reason."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024 // 8 // spec.tp, _MOST_CPU_BYTES)
    raise ConfigError("/proc/meminfo has no MemAvailable line; set kv_blocks")
