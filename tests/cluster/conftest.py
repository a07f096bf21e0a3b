"""The local cluster that the tests of the whole path share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.local_cluster import VOCAB_SIZE, cluster_config, running_cluster


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    from model.fixture import write_random_fixture

    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_random_fixture(path, vocab_size=VOCAB_SIZE)
    return path


@pytest.fixture(scope="session")
def local_cluster(checkpoint, tmp_path_factory):
    with running_cluster("test", tmp_path_factory.mktemp("state"), cluster_config(checkpoint)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def reference():
    """`transformers`' model with the same weights, fp32."""
    from model.fixture import fixture_config, random_tensors
    from tests.support.hf_reference import build_hf_model

    config = fixture_config(vocab_size=VOCAB_SIZE)
    return build_hf_model(config, random_tensors(config))


@pytest.fixture(scope="module")
def trained_router(tmp_path_factory):
    """host:port of a router in front of the shipped trained model."""
    folder = tmp_path_factory.mktemp("trained")
    pools = [
        {"name": "prefill-tp1", "role": "prefill", "kv_blocks": 512, "chunk_tokens": 256},
        {"name": "decode-tp1", "role": "decode", "kv_blocks": 1024, "max_batch": 16},
    ]
    config = cluster_config(folder / "tiny", pools=pools, model={"path": str(folder / "tiny"), "max_model_len": 4096})
    subprocess.run([sys.executable, "-m", "cluster.cli", "fixture", "trained", str(folder / "tiny")], timeout=120, check=True)
    with running_cluster("trained", folder / "state", config) as cluster:
        yield cluster.router
