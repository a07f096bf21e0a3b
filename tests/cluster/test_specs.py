"""What a pool may be on a device is known before any process of it starts."""

import pytest

from cluster.specs import plan_group
from common.config import Config
from common.errors import ConfigError


def config_of(prefill: str, decode: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/models/x"},
            "pools": [
                {"name": "prefill", "role": "prefill", "weights": prefill},
                {"name": "decode", "role": "decode", "weights": decode},
            ],
        }
    )


@pytest.mark.parametrize("weights", ["mxfp4", "fp8"])
def test_a_decode_pool_on_gpus_takes_either_format(weights):
    config = config_of("fp8", weights)
    assert [plan_group(config, pool, b"", device="cuda").weights for pool in config.pools] == ["fp8", weights]


def test_formats_without_kernels_are_refused_on_gpus_alone():
    config = config_of("mxfp4", "bf16")
    with pytest.raises(ConfigError, match=r"pool prefill: weights mxfp4 .* takes fp8"):
        plan_group(config, config.pools[0], b"", device="cuda")
    with pytest.raises(ConfigError, match=r"pool decode: weights bf16 .* takes mxfp4 or fp8"):
        plan_group(config, config.pools[1], b"", device="cuda")
    assert [plan_group(config, pool, b"", device="cpu").weights for pool in config.pools] == ["mxfp4", "bf16"]
