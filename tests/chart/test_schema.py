"""One schema: the chart's is made of the config tree's models; values.yaml shows every key; helm refuses a wrong one by name."""

from __future__ import annotations

import pytest
import yaml
from pydantic import BaseModel

from common.config import Config
from tests.support.chart import CHART, template
from tools.chart.schema import files, values_schema
from tools.chart.values import ChartValues


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_files_made_of_the_models_are_current(path):
    assert path.read_text() == files()[path], "run: python -m tools.chart.schema"


def test_values_yaml_shows_every_key_of_the_chart():
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    config = {key: values.pop(key) for key in list(values) if key in Config.model_fields}
    Config.model_validate(config)
    shown = ChartValues.model_validate(values)
    optional = {"replicas", "minReplicas", "maxReplicas"}  # unset = the pool's own
    assert {key for key in _unset(shown) if key.rpartition(".")[2] not in optional} == set()


def _unset(node, path=""):
    for name, field in type(node).model_fields.items():
        value = getattr(node, name)
        here = f"{path}{field.alias}"
        if value is None:
            yield here
        elif isinstance(value, BaseModel):
            yield from _unset(value, f"{here}.")


def test_the_schema_refuses_unknown_keys_at_every_level():
    open_ones = {"global"}

    def walk(node, path):
        if isinstance(node, list):
            for item in node:
                walk(item, path)
        elif isinstance(node, dict):
            if "properties" in node:
                assert node.get("additionalProperties") is False, path
            for key, value in node.items():
                if key not in open_ones:
                    walk(value, f"{path}.{key}")

    walk(values_schema(), "")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"kv": {"block_sise": 16}}, "block_sise"),
        ({"router": {"queue": {"max_request": 5}}}, "max_request"),
        ({"pools": [{"name": "p", "role": "prefill", "wieghts": "fp8"}, {"name": "d", "role": "decode"}]}, "wieghts"),
        ({"pools": [{"name": "p", "role": "prefil"}]}, "/pools/0/role"),
        ({"prices": {"usd_per_gpu_hour": 0}}, "/prices/usd_per_gpu_hour"),
        ({"autoscale": {"gpu_budget": "eight"}}, "/autoscale/gpu_budget"),
        ({"head": {"rayStartParam": {}}}, "rayStartParam"),
        ({"worker": {"resources": {"limits": {"cpus": 1}}}}, "cpus"),
        ({"worker": {"resources": {"requests": {"memory": "96 GB"}}}}, "/worker/resources"),
        ({"additionalWorkerGroups": {"decode-tp1": {"minReplica": 1}}}, "minReplica"),
        ({"additionalWorkerGroups": {"decode": {}}}, "additionalWorkerGroups.decode: no such pool"),
        ({"deployments": {"router": {"replicas": 0}}}, "/deployments/router/replicas"),
        ({"kind": "RayJob"}, "/kind"),
        ({"imag": {}}, "imag"),
        ({"image": {"tag": "latest"}}, "image.tag"),
        ({"pools": [{"name": "p", "role": "prefill"}]}, "no decode pool"),
        ({"pools": [{"name": "p", "role": "prefill", "layout": {"tp": 3}}, {"name": "d", "role": "decode"}]}, "pools.p.layout.tp"),
        ({"pools": [{"name": "p", "role": "prefill", "layout": {"tp": 4, "ep": 2}}, {"name": "d", "role": "decode"}]}, "pools.p.layout.ep"),
        ({"pools": [{"name": "p", "role": "prefill"}, {"name": "p", "role": "decode"}]}, "pools.p: the name is there twice"),
        ({"pools": [{"name": "p", "role": "prefill", "replicas": {"min": 2}}, {"name": "d", "role": "decode"}]}, "pools.p.replicas.max"),
        ({"autoscale": {"gpu_budget": 1}}, "autoscale.gpu_budget"),
        ({"model": {"path": "/elsewhere/gpt-oss-20b"}}, "model.path"),
        ({"metrics": {"group_port": 0}}, "metrics.group_port"),
        ({"router": {"listen": "127.0.0.1:50051"}}, "router.listen"),
        ({"cluster": {"controller_listen": "0.0.0.0:0"}}, "cluster.controller_listen"),
        ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redisAddress"),
        ({"secrets": {"tls": {"enabled": True, "certManager": {"enabled": True}}}}, "secrets.tls.certManager.issuerRef.name"),
        ({"weights": {"pvc": {"claimName": "mine", "create": {"enabled": True}}}}, "weights.pvc.claimName"),
        ({"worker": {"gpuResource": ""}}, "worker.gpuResource"),
        ({"additionalWorkerGroups": {"decode-tp1": {"minReplicas": 5, "maxReplicas": 4}}}, "additionalWorkerGroups.decode-tp1.maxReplicas"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_fails_at_template_time_with_its_name(values, named):
    result = template(values)
    assert result.returncode != 0
    assert named in result.stderr
