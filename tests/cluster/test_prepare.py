"""A node is prepared step by step; what it still waits for is said in words and never skipped."""

from __future__ import annotations

import shutil
import threading

import pytest

from cluster import prepare as node
from common.config import parse_config
from common.errors import ConfigError
from model.fixture import write_random_fixture


def config_of(path, **changes):
    pools = [{"name": "p", "role": "prefill", "weights": "fp8"}, {"name": "d", "role": "decode"}]
    return parse_config({"model": {"path": str(path)}, "pools": pools, "cluster": {"device": "cpu"}} | changes)


@pytest.fixture
def checkpoint(tmp_path):
    write_random_fixture(tmp_path / "tiny", vocab_size=256)
    return tmp_path / "tiny"


def test_an_fp8_pool_gets_its_shards_once(checkpoint):
    config, lines = config_of(checkpoint), []
    pool = node.pool_of(config, "p")
    node.prepare(config, pool, lines.append, 0)
    assert [line.rpartition(": ")[2].split(",")[0] for line in lines] == ["whole", "written"]
    assert (checkpoint / "tandem-fp8").is_dir()
    node.prepare(config, pool, lines.append, 0)
    assert lines[-1].endswith("there already")


def test_an_mxfp4_pool_needs_the_checkpoint_alone(checkpoint):
    config, lines = config_of(checkpoint), []
    node.prepare(config, node.pool_of(config, "d"), lines.append, 0)
    assert len(lines) == 1
    assert not (checkpoint / "tandem-fp8").exists()


def test_a_pool_on_gpus_waits_for_its_kernels_too(checkpoint):
    config = config_of(checkpoint, cluster={"device": "cuda"})
    assert [step.what for step in node.steps(config, node.pool_of(config, "d"))][-1] == "compiled CUDA kernels"
    assert node.steps(config, node.pool_of(config, "p"))[-1].what == "kernels of FlashInfer and Triton for TP1"


def test_the_prefill_kernels_are_compiled_for_the_pools_own_layout(checkpoint, monkeypatch):
    asked: list[dict] = []
    monkeypatch.setattr("model.prefill_kernels.compile_prefill_kernels", lambda config, **options: asked.append(options))
    pools = [{"name": "p", "role": "prefill", "layout": {"tp": 2}}, {"name": "d", "role": "decode"}]
    config = config_of(checkpoint, cluster={"device": "cuda"}, pools=pools, kv={"block_size": 32})
    step = node.steps(config, node.pool_of(config, "p"))[-1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert step.run() == "not compiled: no GPU here"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert step.run().startswith("ready after")
    assert asked == [{"tp": 2, "ep": 1, "block_size": 32, "device": "cuda"}]


def test_a_checkpoint_that_comes_late_is_waited_for_by_name(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "RETRY_S", 0.01)
    late = tmp_path / "late"
    config, lines, waits = config_of(late), [], threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        waits.set()

    thread = threading.Thread(target=node.prepare, args=(config, node.pool_of(config, "d"), say, 60))
    thread.start()
    assert waits.wait(30)
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy").rename(late)
    thread.join(60)
    assert not thread.is_alive()
    assert lines[0].startswith(f"waits for the checkpoint in {late}: ")
    assert lines[-1] == f"the checkpoint in {late}: whole"
    assert len(lines) == 2, "said once per change"


def test_giving_up_names_the_step(tmp_path):
    config = config_of(tmp_path / "absent")
    with pytest.raises(ConfigError, match="still waits for the checkpoint in"):
        node.prepare(config, node.pool_of(config, "p"), lambda line: None, -1)
    with pytest.raises(ConfigError, match=r"no pool 'x'; there are \['p', 'd'\]"):
        node.pool_of(config, "x")
