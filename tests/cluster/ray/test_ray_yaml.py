"""The shipped `ray up` files pass Ray's own validation, need no address of everybody, and name what the configuration asks for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

RAY = Path(__file__).resolve().parents[3] / "cluster" / "ray"
FILES = sorted(RAY.glob("*.yaml"))


def validated(tree: dict) -> dict:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(tree))
    validate_config(prepared)
    return prepared


def test_there_is_a_file_for_one_machine_for_own_machines_and_for_aws():
    assert [file.stem for file in FILES] == ["aws-h200", "local", "onprem"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ray_accepts_the_file_and_refuses_a_wrong_key_in_it(file):
    tree = yaml.safe_load(file.read_text())
    prepared = validated(tree)
    assert prepared["cluster_name"] == tree["cluster_name"]
    with pytest.raises(Exception, match="head_start_ray_command'"):
        validated(tree | {"head_start_ray_command": []})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_start_command_asks_for_the_token_and_shows_the_dashboard_to_itself(file):
    tree = yaml.safe_load(file.read_text())
    for command in [*tree["head_start_ray_commands"], *tree["worker_start_ray_commands"]]:
        assert "RAY_AUTH_MODE=token" in command
        assert "0.0.0.0" not in command
        if "--head" in command:
            assert "--dashboard-host=127.0.0.1" in command
    assert any("pip install" in command for command in tree["setup_commands"])


def test_aws_has_a_node_type_for_each_role_with_a_resource_of_its_own():
    types = validated(yaml.safe_load((RAY / "aws-h200.yaml").read_text()))["available_node_types"]
    for role in ("prefill", "decode"):
        node = types[f"{role}-h200"]
        assert node["labels"] == {"tandem.dev/role": role}
        assert (node["resources"]["GPU"], node["resources"][f"tandem_{role}"]) == (8, 8)
        assert node["min_workers"] == 0
    assert types["head"]["resources"]["CPU"] == 0
