"""What is wanted: the configuration, pools set by hand, and groups per pool; kept in Ray's own store, so that a later controller goes on.

Owned by `controller.py`. Knows no running group.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.specs import kv_version_of
from common.config import Config, PoolNode
from common.errors import CapacityError, ConfigError, InvalidRequestError

_KEY = b"goals"


@dataclass
class Goals:
    """`pinned`: groups of pools that an operator set; `wanted`: of all pools; `address`: where the directory listens, to be taken again;
    `allow_gap`: replacing may leave nobody to serve for a while; `kv_version`: of the configuration's checkpoint and KV format."""

    namespace: str
    config: Config
    pinned: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    address: str = ""
    allow_gap: bool = False
    kv_version: str = ""

    def __post_init__(self) -> None:
        self._fit()

    @classmethod
    def load(cls, namespace: str, config: Config, *, own_config: bool) -> Goals:
        """What an earlier controller of the namespace has left, if any. `own_config`: its configuration too, else `config` is newer."""
        data = _internal_kv_get(_KEY, namespace=namespace.encode())
        if data is None:
            return cls(namespace, config)
        kept = json.loads(data)
        if own_config:
            config = Config.model_validate_json(kept["config"])
        return cls(namespace, config, kept["pinned"], kept["wanted"], kept["address"], kept["allow_gap"])

    def save(self) -> None:
        kept = {"config": self.config.model_dump_json(), "pinned": self.pinned, "wanted": self.wanted, "address": self.address}
        data = json.dumps(kept | {"allow_gap": self.allow_gap}).encode()
        _internal_kv_put(_KEY, data, overwrite=True, namespace=self.namespace.encode())

    @staticmethod
    def forget_all(namespace: str) -> None:
        _internal_kv_del(_KEY, namespace=namespace.encode())

    @property
    def pools(self) -> dict[str, PoolNode]:
        return {pool.name: pool for pool in self.config.pools}

    def pool(self, name: str) -> PoolNode:
        """Raises: ConfigError naming the pools there are"""
        found = self.pools.get(name)
        if found is None:
            raise ConfigError(f"no pool {name!r}; there are {sorted(self.pools)}")
        return found

    def pin(self, name: str, replicas: int) -> None:
        """Sets a pool by hand; 0 empties it whatever its minimum.

        Raises: ConfigError, InvalidRequestError for a number beyond the pool's maximum, CapacityError beyond the GPU budget
        """
        pool = self.pool(name)
        if not 0 <= replicas <= pool.replicas.max:
            raise InvalidRequestError("replicas", f"{replicas} of {name}; must lie in [0, {pool.replicas.max}], the pool's replicas.max")
        held = self.pinned | {name: replicas}
        gpus = sum(held.get(other.name, other.replicas.min) * other.layout.tp for other in self.config.pools)
        budget = self.config.autoscale.gpu_budget
        if gpus > budget:
            raise CapacityError(f"that would take {gpus} GPUs with the other pools' least; autoscale.gpu_budget is {budget}")
        self.pinned = held
        self._fit()
        self.save()

    def unpin(self, name: str) -> int:
        """Gives a pool back to the autoscaler. Returns: groups wanted for now. Raises: ConfigError"""
        self.pool(name)
        self.pinned.pop(name, None)
        self._fit()
        self.save()
        return self.wanted[name]

    def want(self, wanted: dict[str, int]) -> None:
        """The autoscaler's numbers."""
        self.wanted = dict(wanted)
        self._fit()
        self.save()

    def replace_config(self, config: Config, *, allow_gap: bool) -> None:
        """Raises: ConfigError if the checkpoint can't be read; then nothing has changed"""
        self.kv_version = kv_version_of(config)
        self.config, self.allow_gap = config, allow_gap
        self._fit()
        self.save()

    def _fit(self) -> None:
        """Pins and bounds hold, and pools that are not in the configuration are forgotten."""
        pools = self.pools
        self.pinned = {name: min(count, pools[name].replicas.max) for name, count in self.pinned.items() if name in pools}
        bounded = {name: min(max(self.wanted.get(name, 0), pool.replicas.min), pool.replicas.max) for name, pool in pools.items()}
        self.wanted = bounded | self.pinned
