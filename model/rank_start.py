"""What ranks of both roles do before they differ: join the group, load weights, agree on memory, bind the leader's port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.kv_layout import KVGeometry
from common.kv_proto import geometry_to_proto
from common.proto import plan_pb2, types_pb2
from common.rank_spec import RankSpec
from common.server_thread import ServerThread
from common.wire import Wire
from model.build import BuildModel, BuiltModel
from model.control import LeaderChannel
from model.group import GroupLinks, RankWatch, open_group
from model.kv_memory import agree_on_memory
from model.rank_life import RankLife


@dataclass
class StartedRank:
    """Units: max_len: longest prompt + output [tokens]"""

    spec: RankSpec
    wire: Wire
    links: GroupLinks
    built: BuiltModel
    geometry: KVGeometry
    max_len: int
    facts: plan_pb2.GroupFacts
    own_server: ServerThread | None

    @property
    def server(self) -> ServerThread:
        """Bound, not serving yet; rank 0 alone has one."""
        assert self.own_server is not None
        return self.own_server

    def watch(self, life: RankLife) -> RankWatch:
        """Ends this rank when another one's process is gone."""
        return RankWatch(list(self.facts.ranks), self.spec.rank, lambda rank: life.fail(f"rank {rank} of the group died"))

    def describe(self, role: types_pb2.Role, transports: list[str]) -> types_pb2.GroupDescription:
        """What the group tells of itself; for rank 0."""
        spec, g = self.spec, self.geometry
        return types_pb2.GroupDescription(
            pool=spec.pool,
            group=spec.group,
            role=role,
            layout=types_pb2.Layout(tp=spec.tp, ep=spec.ep, dp=1),
            incarnation=spec.incarnation,
            address=self.facts.leader_address,
            kv=geometry_to_proto(g),
            capacity_tokens=self.facts.full_blocks * g.block_size_tokens,
            max_batch=spec.max_batch if role == types_pb2.ROLE_DECODE else 1,
            max_model_len=self.max_len,
            ranks=self.facts.ranks,
            weights=spec.weights,
            transports=transports,
            kv_version=spec.kv_version,
        )

    def close(self) -> None:
        self.links.close()
        if self.own_server is not None:
            self.own_server.stop(0)


def start_rank(
    spec: RankSpec, build: BuildModel, life: RankLife, sliding_blocks: Callable[[KVGeometry, int], int], useful_sequences: int
) -> StartedRank:
    """Returns once all ranks of the group have loaded.

    Units: sliding_blocks(geometry, max_len): blocks of the sliding pool; useful_sequences: full blocks for more longest sequences than
        this are never asked for; life: told what is being done
    Raises: ServingError; then nothing is left open
    """
    torch.set_num_threads(1)
    wire = Wire(spec.security, spec.key)
    life.doing = "waits for the group's other ranks"
    links = open_group(spec)
    server = None
    try:
        life.doing = "reads weights"
        built = build(spec, links.compute)
        geometry = built.config.kv_geometry(spec.block_size, spec.kv_dtype)
        max_len = min(spec.max_model_len, built.config.max_position)
        server = ServerThread(spec.listen_host, wire) if isinstance(links.control, LeaderChannel) else None
        life.doing = "waits for the group's other ranks to have their weights"
        facts = agree_on_memory(
            spec,
            links,
            geometry,
            sliding_blocks=sliding_blocks(geometry, max_len),
            useful_full_blocks=useful_sequences * geometry.blocks_for(max_len),
            leader_address=server.address if server else "",
            step_bytes=built.step_bytes,
        )
    except BaseException:
        links.close()
        if server is not None:
            server.stop(0)
        raise
    life.doing = "makes KV pools, compiles kernels, records graphs"
    return StartedRank(spec, wire, links, built, geometry, max_len, facts, server)
