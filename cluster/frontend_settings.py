"""The config's frontend node as the plain settings that a frontend is started with. Called by `tandem frontend`."""

from __future__ import annotations

from dataclasses import replace

from cluster.specs import security_of, tracing_of
from common.config import Config
from common.errors import ConfigError
from frontend.settings import FrontendSettings
from frontend.text_encoder import TextLimits

DEFAULT_LISTEN = "127.0.0.1:8000"


def frontend_settings(config: Config, router: str) -> FrontendSettings:
    """`router`: host:port. Raises: ConfigError naming the value that is out of range"""
    node, tls = config.frontend, config.security.tls
    host, port = _host_port(node.listen or DEFAULT_LISTEN)
    security = security_of(config)
    return FrontendSettings(
        router=router,
        router_security=replace(security, token_file=str(node.token_file)) if node.token_file else security,
        host=host,
        port=port,
        grpc_listen=node.grpc_listen,
        certificate=(str(tls.cert_file), str(tls.key_file)) if node.https and tls else None,
        client_ca_file=str(tls.ca_file) if node.https and tls and tls.mutual == "all" else None,
        tracing=tracing_of(config),
        metrics_host=config.metrics.host,
        metrics_port=node.metrics_port,
        vocab_dir=config.model.vocab,
        model_names=node.model_names,
        keys_file=node.keys_file,
        cors_origins=node.cors_origins,
        max_body_bytes=node.max_body_bytes,
        max_streams=node.max_streams,
        stalled_client_s=node.stalled_client_s,
        default_deadline_s=node.default_deadline_s,
        drain_s=node.drain_s,
        includes_date=node.includes_date,
        encoder_threads=node.encoder_threads,
        limits=TextLimits(max_chars=node.max_chars),
    )


def _host_port(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"frontend.listen is {listen!r}; expected host:port")
    return host, int(port)
