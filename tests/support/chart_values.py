"""Value sets for the chart that somebody might really write, drawn by seed: layouts, weights, secrets, monitoring, placement."""

from __future__ import annotations

import random
from typing import Any

LAYOUTS = [{"tp": 1}, {"tp": 2}, {"tp": 2, "ep": 2}, {"tp": 4, "ep": 4}, {"tp": 8, "ep": 8}]
TAINT = {"key": "team", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}
SPREAD = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}


def generated_values(seed: int) -> dict[str, Any]:
    """Always the same for one seed; all of them are right."""
    rng = random.Random(seed)
    pools = [_pool(rng, role, index) for role in ("prefill", "decode") for index in range(rng.randint(1, 3))]
    gpus = sum(pool["layout"]["tp"] * pool["replicas"]["min"] for pool in pools)
    on_cpu = rng.random() < 0.3
    tls = rng.random() < 0.4
    return {
        "kind": rng.choice(["RayCluster", "RayService"]),
        "fullnameOverride": rng.choice(["", "", "x" * 60]),
        "model": {"path": f"/models/{rng.choice(['gpt-oss-20b', 'team/gpt-oss-120b'])}", "max_model_len": rng.choice([4096, 131072])},
        "pools": pools,
        "kv": {"block_size": rng.choice([16, 32, 64]), "transport": rng.choice(["auto", "tcp", "nixl"])},
        "router": {"drain_s": rng.choice([0, 30, 120.5, 600]), "objective": {"latency_weight": rng.random()}},
        "autoscale": {"gpu_budget": gpus + rng.randint(1, 16)},
        "frontend": {"model_names": ["gpt", "oss"][: seed % 3], "grpc_listen": rng.choice([None, "0.0.0.0:8001"])},
        "cluster": {"device": "cpu" if on_cpu else "cuda"},
        "image": {"repository": "registry.example/ai/tandem", "tag": f"0.{seed}.0"},
        "imagePullSecrets": rng.choice([[], [{"name": "pull"}]]),
        "head": {
            "enableInTreeAutoscaling": rng.random() < 0.8,
            "nodeSelector": {"pool": "system"},
            "rayStartParams": rng.choice([{}, {"object-store-memory": "500000000"}]),
            "containerEnv": [{"name": "RAY_LOG_LEVEL", "value": "info"}],
            "sidecarContainers": [],
        },
        "worker": {
            "gpuResource": "" if on_cpu else rng.choice(["nvidia.com/gpu", "nvidia.com/mig-3g.71gb"]),
            "priorityClassName": rng.choice(["", "serving"]),
            "tolerations": rng.choice([[], [TAINT]]),
            "topologySpreadConstraints": rng.choice([[], [SPREAD]]),
            "annotations": {"team": "llm"},
        },
        "additionalWorkerGroups": _overrides(rng, pools),
        "gcsFaultTolerance": _redis(rng),
        "weights": _weights(rng),
        "kernelCache": {"hostPath": rng.choice(["", "/var/cache/tandem"])},
        "deployments": {
            "router": {"replicas": rng.randint(1, 5), "autoscaling": {"enabled": rng.random() < 0.5}},
            "frontend": {
                "enabled": rng.random() < 0.7,
                "apiKeysSecret": rng.choice(["", "keys"]),
            },
        },
        "serviceAccount": {"create": rng.random() < 0.8, "name": rng.choice(["", "own"])},
        "networkPolicy": {"enabled": rng.random() < 0.8, "clientFrom": rng.choice([[], [{"podSelector": {"matchLabels": {"app": "x"}}}]])},
        "secrets": {
            "transferKey": {"existingSecret": rng.choice(["", "mine"])},
            "rayAuth": {"enabled": rng.random() < 0.8, "existingSecret": rng.choice(["", "ray"])},
            "tokens": {"enabled": rng.random() < 0.5},
            "tls": {"enabled": tls, "certManager": {"enabled": rng.random() < 0.5, "issuerRef": {"name": "ca"}}},
        },
        "monitoring": {name: {"enabled": rng.random() < 0.6} for name in ("serviceMonitor", "podMonitor", "dashboards", "prometheusRule")},
    }


def _pool(rng: random.Random, role: str, index: int) -> dict[str, Any]:
    least = rng.randint(0 if index else 1, 2)
    return {
        "name": f"{role}-{index}",
        "role": role,
        "layout": rng.choice(LAYOUTS),
        "weights": rng.choice(["mxfp4", "fp8", "bf16"]),
        "replicas": {"min": least, "max": max(1, least + rng.randint(0, 3))},
    }


def _overrides(rng: random.Random, pools: list[dict]) -> dict[str, Any]:
    amounts = {"cpu": "16", "memory": "200Gi"}
    chosen = rng.sample(pools, rng.randint(0, len(pools)))
    return {
        pool["name"]: {"resources": {"requests": amounts, "limits": amounts}, "nodeSelector": {"pool": pool["name"]}, "maxReplicas": 9}
        for pool in chosen
    }


def _redis(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"enabled": False}
    return {"enabled": True, "redisAddress": "redis://redis:6379", "redisPassword": {"existingSecret": rng.choice(["", "redis"])}}


def _weights(rng: random.Random) -> dict[str, Any]:
    source = rng.choice(["pvc", "hostPath", "download"])
    create = source == "pvc" and rng.random() < 0.5
    return {
        "source": source,
        "readOnly": rng.random() < 0.5,
        "pvc": {"claimName": "" if create else "models", "create": {"enabled": create, "storageClassName": rng.choice(["", "nfs"])}},
        "download": {"tokenSecret": rng.choice(["", "hf"]), "revision": rng.choice(["", "0" * 40])},
    }
