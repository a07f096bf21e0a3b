"""Whether a configuration can be served at all, known before any process is started. Called by the CLI and the controller."""

from __future__ import annotations

from common.config import Config
from common.errors import ConfigError, ServingError
from common.kv_layout import check_join
from model.config import check_layout, load_model_config


def check_pools(config: Config) -> None:
    """Everything about the pools that can be known from the config and the checkpoint's own config file.

    Raises: ConfigError, with every pool that can't run and every pair that can't be joined
    """
    model = load_model_config(config.model.path)
    geometry = model.kv_geometry(config.kv.block_size, config.kv.dtype)
    reasons = []
    for pool in config.pools:
        try:
            check_layout(model, pool.layout.tp, pool.layout.ep)
            check_join(geometry, pool.layout.tp, geometry, pool.layout.tp)
        except ServingError as exc:
            reasons.append(f"pool {pool.name}: {exc}")
    if config.model.max_model_len > model.max_position:
        reasons.append(f"model.max_model_len {config.model.max_model_len} is past the model's {model.max_position}")
    if reasons:
        raise ConfigError("; ".join(reasons))
