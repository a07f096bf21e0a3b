"""From the config tree to what each rank process is told: pure."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

from common.config import Config, PoolNode
from common.errors import ConfigError
from common.rank_spec import CUDA_WEIGHTS, RankSpec
from common.tls import TlsFiles
from common.tracing import TracingSpec
from common.wire import Security


def plan_group(config: Config, pool: PoolNode, key: bytes, *, device: str, kv_version: str = "") -> RankSpec:
    """Rank 0's spec of a new group, with a name and an incarnation of its own; `for_rank` gives the others.

    Raises: ConfigError if this pool can't run on `device`
    """
    _check_transport(config.kv.transport, device)
    _check_weights(pool, device)
    suffix = secrets.token_hex(3)
    return RankSpec(
        pool=pool.name,
        group=f"{pool.name}-{suffix}",
        role=pool.role,
        model_path=str(config.model.path),
        tp=pool.layout.tp,
        ep=pool.layout.ep,
        rank=0,
        rendezvous="",
        incarnation=secrets.randbits(64),
        key=key,
        block_size=config.kv.block_size,
        kv_dtype=config.kv.dtype,
        kv_blocks=pool.kv_blocks,
        max_batch=pool.max_batch,
        chunk_tokens=pool.chunk_tokens,
        max_model_len=config.model.max_model_len,
        transport=config.kv.transport,
        lease_s=config.kv.lease_s,
        router_lease_s=config.router.lease_s,
        device=device,
        compute_dtype=config.cluster.compute_dtype,
        weights=pool.weights,
        vocab=str(config.model.vocab) if config.model.vocab else None,
        security=security_of(config),
        tracing=tracing_of(config),
        metrics_host=config.metrics.host,
        metrics_port=config.metrics.group_port,
        kv_version=kv_version,
    )


def security_of(config: Config) -> Security:
    tls = config.security.tls
    return Security(
        tls=TlsFiles(str(tls.ca_file), str(tls.cert_file), str(tls.key_file), tls.mutual, tls.peer_name) if tls else None,
        key_file=str(config.cluster.key_file) if config.cluster.key_file else None,
        tokens_file=str(config.security.tokens_file) if config.security.tokens_file else None,
        requires_tokens=config.security.tokens_file is not None,
    )


def tracing_of(config: Config) -> TracingSpec | None:
    node = config.tracing
    return None if node.exporter == "none" else TracingSpec(node.exporter, node.target, node.sample_ratio)


def for_rank(spec: RankSpec, rank: int, rendezvous: str, listen_host: str) -> RankSpec:
    return replace(spec, rank=rank, rendezvous=rendezvous, listen_host=listen_host)


def kv_version_of(config: Config) -> str:
    """Equal for two configurations whose groups may exchange KV: same checkpoint (by its config and the sizes of its files), same format.

    Raises: ConfigError if the checkpoint can't be read
    """
    path = config.model.path
    try:
        files = sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.suffix == ".safetensors")
        about = (path / "config.json").read_bytes()
    except OSError as exc:
        raise ConfigError(f"model.path {path}: {exc}") from exc
    return _digest(str(path), about, files, config.kv.dtype, config.kv.block_size)


def fingerprint_of(spec: RankSpec, pool: PoolNode) -> str:
    """Equal for two groups that do the same: what a group is told, less what is its own."""
    own = replace(spec, group="", incarnation=0, rank=0, rendezvous="", key=b"", listen_host="")
    return _digest(own, sorted(pool.node_labels.items()))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _check_weights(pool: PoolNode, device: str) -> None:
    """Raises: ConfigError if the kernels of `device` don't take the pool's experts"""
    served = CUDA_WEIGHTS[pool.role]
    if device == "cuda" and pool.weights not in served:
        raise ConfigError(f"pool {pool.name}: weights {pool.weights} in a {pool.role} pool on cuda, which takes {' or '.join(served)}")


def _check_transport(transport: str, device: str) -> None:
    """Raises: ConfigError if pools on `device` can't be reached that way"""
    from importlib.util import find_spec

    missing = {"cpu": ("cuda_ipc", "nccl"), "cuda": ("shm",)}.get(device, ())
    if transport in missing:
        raise ConfigError(f"kv.transport is {transport}, which is not for pools on {device}; set auto")
    if transport == "nixl" and device == "cpu" and find_spec("nixl_cu12") is None:
        raise ConfigError("kv.transport is nixl, which is not installed: pip install 'tandem[nixl]'")
