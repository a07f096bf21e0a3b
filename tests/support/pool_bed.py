"""A router in this process in front of a controller's groups: it follows the directory and reports its load, as in production."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from cluster.router.directory import ControllerDirectory
from cluster.router.load_report import report_forever
from cluster.router.main import specs_of
from common.wire import PLAIN
from tests.support.pool_cluster import PoolCluster
from tests.support.router_bed import Bed, bed


@asynccontextmanager
async def pool_bed(cluster: PoolCluster, itl_targets: Mapping[str, float] | None = None, **kwargs) -> AsyncIterator[Bed]:
    """`kwargs` as of `router_bed.make_router`."""
    own = {"router_id": f"router-{cluster.name}", "specs": specs_of(cluster.config)}
    async with bed(directory=ControllerDirectory(cluster.address), **own | kwargs) as router:
        reporting = asyncio.create_task(report_forever(router.router.pools, itl_targets or {}, cluster.address, PLAIN))
        try:
            yield router
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
