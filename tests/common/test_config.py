"""The config tree: good presets load, every wrong key is named, overrides reach any leaf."""

from pathlib import Path

import pytest
import yaml

from common.config import load_config, parse_config
from common.errors import ConfigError

PRESETS = sorted((Path(__file__).resolve().parents[2] / "examples" / "configs").glob("*.yaml"))


def tree(**changes):
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "layout": {"tp": 4, "ep": 4}}]
    return {"model": {"path": "/m"}, "pools": pools, **changes}


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_every_preset_loads(path):
    assert load_config(path).pools


def test_overrides_reach_leaves_by_name_and_index():
    config = parse_config(tree(), ["pools.d.max_batch=7", "pools.0.weights=fp8", "router.queue.max_requests=512"])
    assert (config.pools[1].max_batch, config.pools[0].weights, config.router.queue.max_requests) == (7, "fp8", 512)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv": {"block_sise": 16}}, "kv.block_sise"),
        ({"pools": []}, "pools"),
        ({"pools": [{"name": "p", "role": "prefill"}]}, "no decode pool"),
        ({"pools": tree()["pools"][:1] * 2 + tree()["pools"][1:]}, "names must differ"),
        ({"prices": {"usd_per_gpu_hour": -1}}, "prices.usd_per_gpu_hour"),
        ({"autoscale": {"gpu_budget": 2}}, "gpu_budget is 2"),
        ({"pools": [{"name": "P!", "role": "prefill"}, *tree()["pools"][1:]]}, "pools.0.name"),
        ({"pools": [{"name": "p", "role": "prefill", "layout": {"tp": 3}}, *tree()["pools"][1:]]}, "tp is 3"),
        ({"pools": [{"name": "p", "role": "prefill", "layout": {"tp": 4, "ep": 2}}, *tree()["pools"][1:]]}, "ep is 2"),
        ({"pools": [{"name": "p", "role": "prefill", "replicas": {"min": 3, "max": 2}}, *tree()["pools"][1:]]}, "replicas max 2"),
    ],
)
def test_a_wrong_key_is_named_in_one_line(changes, named):
    with pytest.raises(ConfigError) as caught:
        parse_config(tree(**changes))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["nonsense", "=1", "pools.nobody.max_batch=1", "model.path.x=1", "kv.block_size={"])
def test_a_wrong_override_is_named(override):
    with pytest.raises(ConfigError):
        parse_config(tree(), [override])


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(path)
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.yaml")


def test_the_tree_is_frozen_and_round_trips():
    config = parse_config(tree())
    with pytest.raises(ValueError, match="frozen"):
        config.kv.block_size = 32
    assert parse_config(yaml.safe_load(config.model_dump_json())) == config


def test_paths_of_a_file_stand_for_the_same_place_wherever_the_tree_is_handed_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    pools = "[{name: p, role: prefill}, {name: d, role: decode}]"
    Path("c.yaml").write_text(f"model: {{path: models/tiny, vocab: /v}}\npools: {pools}\ncluster: {{key_file: ~/keys}}\n")
    config = load_config(Path("c.yaml"))
    assert (config.model.path, config.model.vocab) == (tmp_path / "models" / "tiny", Path("/v"))
    assert config.cluster.key_file == Path("/home/somebody/keys")
    assert [pool.name for pool in config.pools] == ["p", "d"]
