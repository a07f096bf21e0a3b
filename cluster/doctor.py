"""Checks a machine and a configuration before and while Tandem runs on them: one finding per check, with what to do about it.

Changes nothing and starts nothing. Each check stands alone: what it can't find out is a finding, not a failure of the others.
"""

from __future__ import annotations

import ctypes
import datetime
import enum
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.config import Config
from common.errors import ServingError
from common.keyring import Keyring

_SHM_GB = 1.0
_CERT_DAYS = 14
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised


class Level(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Finding:
    """`found`: what is so; `action`: what to do, empty if nothing."""

    check: str
    level: Level
    found: str
    action: str = ""


Check = Callable[[Config | None], Iterator[Finding]]


def examine(config: Config | None) -> list[Finding]:
    """Every check in turn. Without a configuration those of the machine alone."""
    return [finding for name, check in CHECKS.items() for finding in _guarded(name, check, config)]


def _guarded(name: str, check: Check, config: Config | None) -> list[Finding]:
    try:
        return list(check(config))
    except (ServingError, OSError, RuntimeError) as exc:
        return [Finding(name, Level.FAIL, " ".join(str(exc).split())[:300], "")]


def _driver(config: Config | None) -> Iterator[Finding]:
    import torch

    wanted = config is not None and config.cluster.device == "cuda"
    if not torch.cuda.is_available():
        if wanted:
            yield Finding("driver", Level.FAIL, "no usable NVIDIA GPU", "install the driver; `nvidia-smi` must list the GPUs")
        else:
            yield Finding("driver", Level.SKIP, "no NVIDIA GPU: pools run on the CPU")
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found = f"GPU {i}: {p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}, CUDA {torch.version.cuda}"
        if p.major < 9:
            yield Finding("driver", Level.FAIL, found, "Tandem's kernels need sm_90 (H100, H200) or newer")
        else:
            yield Finding("driver", Level.OK, found)


def _nccl(config: Config | None) -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("NCCL", Level.SKIP, "no NVIDIA GPU")
        return
    if not torch.distributed.is_nccl_available():
        yield Finding("NCCL", Level.FAIL, "this PyTorch has no NCCL", "install a CUDA build of PyTorch")
        return
    yield Finding("NCCL", Level.OK, ".".join(map(str, torch.cuda.nccl.version())))


def _peers(config: Config | None) -> Iterator[Finding]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        yield Finding("peer access", Level.SKIP, f"{count} GPUs")
        return
    apart = [(a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        action = "KV goes through host memory between these; look at `nvidia-smi topo -m`, and at ACS and IOMMU in the BIOS"
        yield Finding("peer access", Level.WARN, f"no direct access between {apart}", action)
    else:
        yield Finding("peer access", Level.OK, f"all {count} GPUs reach each other")


def _transports(config: Config | None) -> Iterator[Finding]:
    from kv_transfer.transports import nixl

    free_gb = shutil.disk_usage("/dev/shm").free / 1e9
    if free_gb < _SHM_GB:
        action = "KV pools on a CPU live in /dev/shm: give it more (docker --shm-size, an emptyDir of medium Memory)"
        yield Finding("transport shm", Level.WARN, f"{free_gb:.1f} GB free in /dev/shm", action)
    else:
        yield Finding("transport shm", Level.OK, f"{free_gb:.1f} GB free in /dev/shm")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
        yield Finding("transport tcp", Level.OK, "loopback connects")
    wanted = config is not None and config.kv.transport == "nixl"
    if nixl.is_installed():
        yield Finding("transport nixl", Level.OK, "installed")
    else:
        yield Finding(
            "transport nixl", Level.FAIL if wanted else Level.SKIP, "not installed", "pip install 'tandem[nixl]'" if wanted else ""
        )


def _ports(config: Config | None) -> Iterator[Finding]:
    if config is None:
        return
    fixed = {
        "router.listen": config.router.listen,
        "cluster.controller_listen": config.cluster.controller_listen,
        "metrics.controller_port": f"{config.metrics.host}:{config.metrics.controller_port}",
        "metrics.router_port": f"{config.metrics.host}:{config.metrics.router_port}",
    }
    for key, address in fixed.items():
        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            yield Finding("ports", Level.FAIL, f"{key} is {address!r}", "give host:port")
            continue
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))
            yield Finding("ports", Level.OK, f"{key} {address}" + (" (any free port)" if port == "0" else ""))
        except OSError as exc:
            yield Finding("ports", Level.WARN, f"{key} {address}: {exc.strerror}", f"fine if this cluster runs already; else change {key}")


def _weights(config: Config | None) -> Iterator[Finding]:
    if config is None:
        return
    from cluster.check import check_pools
    from model.checkpoint import open_checkpoint
    from model.config import load_model_config

    path = config.model.path
    if not path.is_dir():
        yield Finding("weights", Level.FAIL, f"{path} is no folder", "put the official checkpoint there, or change model.path")
        return
    check_pools(config)
    open_checkpoint(path, load_model_config(path))
    yield Finding("weights", Level.OK, f"{path}: every pool of the configuration can be built from it")


def _vocabulary(config: Config | None) -> Iterator[Finding]:
    from frontend.vocab import load_vocabulary

    try:
        load_vocabulary(config.model.vocab if config else None)
    except ServingError as exc:
        action = "set model.vocab to a folder with o200k_base.tiktoken; without it there are no stop strings and no chat"
        yield Finding("vocabulary", Level.WARN, exc.message[:200], action)
    else:
        yield Finding("vocabulary", Level.OK, "o200k_base is there and its hash is right")


def _clock(config: Config | None) -> Iterator[Finding]:
    buffer = ctypes.create_string_buffer(512)  # struct timex, all zero: read only
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    if state < 0:
        yield Finding("clock", Level.SKIP, f"the kernel does not tell: {os.strerror(ctypes.get_errno())}")
    elif state == _TIME_ERROR:
        action = "run chrony or systemd-timesyncd: certificates and logs of several hosts need it; leases do not"
        yield Finding("clock", Level.WARN, "not synchronised", action)
    else:
        yield Finding("clock", Level.OK, "synchronised")


def _secrets(config: Config | None) -> Iterator[Finding]:
    if config is None:
        return
    if config.cluster.key_file is not None:
        keys = Keyring.of_file(config.cluster.key_file).all()
        yield _private("cluster.key_file", config.cluster.key_file, f"{len(keys)} keys")
    if config.security.tokens_file is not None:
        yield _private("security.tokens_file", config.security.tokens_file, "readable")
    if config.security.tls is not None:
        yield _private("security.tls.key_file", config.security.tls.key_file, "readable")
        yield from _certificate(config.security.tls.cert_file)
    listens = {config.router.listen.rpartition(":")[0], config.cluster.controller_listen.rpartition(":")[0]}
    if listens - {"127.0.0.1", "localhost", "[::1]"} and (config.security.tls is None or config.security.tokens_file is None):
        action = "set security.tls and security.tokens_file, or listen on 127.0.0.1"
        yield Finding("security", Level.WARN, "others can reach the router or the controller without certificate or token", action)


def _private(key: str, path: Path, found: str) -> Finding:
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return Finding("secrets", Level.WARN, f"{key} {path} is open to every user", f"chmod 600 {path}")
    return Finding("secrets", Level.OK, f"{key}: {found}")


def _certificate(path: Path) -> Iterator[Finding]:
    from cryptography import x509

    ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    days = (ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    found = f"{path} is good until {ends:%Y-%m-%d %H:%M} UTC"
    if days < 0:
        yield Finding(
            "certificate", Level.FAIL, f"{path} ended on {ends:%Y-%m-%d %H:%M} UTC", "write a new one there; no restart is needed"
        )
    elif days < _CERT_DAYS:
        yield Finding("certificate", Level.WARN, found, "write a new one there; no restart is needed")
    else:
        yield Finding("certificate", Level.OK, found)


CHECKS: dict[str, Check] = {
    "driver": _driver,
    "NCCL": _nccl,
    "peer access": _peers,
    "transports": _transports,
    "ports": _ports,
    "weights": _weights,
    "vocabulary": _vocabulary,
    "clock": _clock,
    "secrets": _secrets,
}
