"""Joins the GPU ranks of one group in a NCCL communicator.

The group's TCP star introduces them: rank 0 makes a private folder for the meeting, all ranks of a group share its host. NCCL talks over
loopback and NVLink; NVLink multicast stays off. A collective that does not end in time ends the process (torch's watchdog), which the
cluster replaces; a rank whose process has died is noticed earlier by `model/group.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.parallel import ParallelGroup, TorchGroup

COLLECTIVE_TIMEOUT_S = 300.0  # holds the time that one rank compiles while another waits at start
_PATH_BYTES = 512
_CHANNELS = 16  # multiprocessors that a sum takes from the kernels it runs beside: enough for most of NVLink's rate


def open_device_group(star: ParallelGroup, *, backend: str = "nccl") -> tuple[TorchGroup, Callable[[], None]]:
    """Every rank calls it at the same time, once per process.

    Returns: the group, and what ends it
    Effects: makes torch's default process group; sets NCCL's environment for this process
    Raises: what torch raises if NCCL can't start
    """
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    folder = _agree_on_folder(star)
    options: dict[str, Any] = {}
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl.config.max_ctas = _CHANNELS
        options = {"pg_options": nccl, "device_id": torch.device("cuda", torch.cuda.current_device())}
    dist.init_process_group(
        backend, store=dist.FileStore(str(folder / "store"), star.size), rank=star.rank, world_size=star.size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), **options,
    )  # fmt: skip
    group = TorchGroup()

    def end() -> None:
        if backend == "nccl":
            dist.distributed_c10d._get_default_group().abort()  # leaving in order would wait for a rank that is gone
        else:
            dist.destroy_process_group()
        if star.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    return group, end


def _agree_on_folder(star: ParallelGroup) -> Path:
    """A folder of this user alone, made by rank 0."""
    name = tempfile.mkdtemp(prefix="tandem-group-").encode() if star.rank == 0 else b""
    padded = torch.frombuffer(bytearray(name.ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8)[None]
    return Path(star.all_gather(padded, dim=0)[0].numpy().tobytes().rstrip(b"\0").decode())
