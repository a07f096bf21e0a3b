"""What a frontend is started with: plain values, checked once, frozen. Whoever starts one (a CLI, a test) builds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from common.errors import ConfigError
from common.tracing import TracingSpec
from common.wire import Security
from frontend.text_encoder import TextLimits


@dataclass(frozen=True)
class FrontendSettings:
    """Settings of one frontend process.

    Attributes:
        router: host:port of the router's gRPC server; `router_security`: how it is reached.
        grpc_listen: host:port of the gRPC chat service; None for none.
        certificate: PEM files (certificate, key) to serve HTTPS and gRPC with, followed when they change; None for plain.
        client_ca_file: PEM file of the authority whose certificate HTTPS clients must show; None lets them do without.
        tracing: where spans go; None for nowhere.
        metrics_host, metrics_port: where /metrics is served, without authentication; port 0 is any free one.
        model_names: names that requests may give; empty for the router's own.
        keys_file: who may call (see `frontend.http.auth`); None lets everybody in.
        cors_origins: origins that browsers may call from; empty for none.
        max_body_bytes: of one HTTP request. max_streams: requests served at once; more are answered 429.
        stalled_client_s: how long a client may take nothing of its stream before it counts as gone.
        drain_s: how long running replies may go on after SIGTERM.
        default_deadline_s: for requests that name none.
        includes_date: whether today's date stands in the prompt.
    """

    router: str = "127.0.0.1:50051"
    host: str = "127.0.0.1"
    port: int = 8000
    tracing: TracingSpec | None = None
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    vocab_dir: Path | None = None
    router_security: Security = field(default_factory=Security)
    grpc_listen: str | None = None
    certificate: tuple[str, str] | None = None
    client_ca_file: str | None = None
    model_names: tuple[str, ...] = ()
    keys_file: Path | None = None
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 << 20
    max_streams: int = 4096
    stalled_client_s: float = 30.0
    drain_s: float = 120.0
    default_deadline_s: float = 600.0
    includes_date: bool = True
    encoder_threads: int = 4
    limits: TextLimits = field(default_factory=TextLimits)

    def __post_init__(self) -> None:
        """Raises: ConfigError naming the value that is out of range."""
        for name in ("max_body_bytes", "max_streams", "stalled_client_s", "default_deadline_s", "encoder_threads"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"frontend {name} is {getattr(self, name)}; it must be above 0")
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"frontend {name} is {getattr(self, name)}; expected 0 to 65535")
        if self.drain_s < 0:
            raise ConfigError(f"frontend drain_s is {self.drain_s}; it must not be negative")
