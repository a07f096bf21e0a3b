"""The one configuration tree: read once from YAML, validated, frozen. What is measured at run time is not here.

Helm renders the same tree; `tandem --config FILE --set a.b=c` reads it; constructors elsewhere take the values they use, not the tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from common.errors import ConfigError


class Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelNode(Node):
    path: Path = Field(description="official checkpoint folder")
    max_model_len: int = Field(default=131072, ge=1, description="longest prompt + output [tokens]")
    vocab: Path | None = Field(default=None, description="folder with o200k_base.tiktoken; needed for stop strings")


class LayoutNode(Node):
    tp: int = Field(default=1, description="attention shards")
    ep: int = Field(default=1, description="expert shards (whole experts); 1 with tp > 1 cuts each expert into tp pieces")
    dp: Literal[1] = Field(default=1, description="copies inside a group; only 1 exists, use replicas")

    @model_validator(mode="after")
    def _ranks_agree(self) -> LayoutNode:
        if self.tp not in (1, 2, 4, 8):
            raise ValueError(f"tp is {self.tp}; 1, 2, 4 and 8 exist")
        if self.ep not in (1, self.tp):
            raise ValueError(f"ep is {self.ep}; it must be 1 or equal tp ({self.tp}): every rank holds a part of both")
        return self


class ReplicasNode(Node):
    """How many groups a pool has, and the targets that decide it between the bounds."""

    min: int = Field(default=1, ge=0, description="0: the pool sleeps while nobody asks, the first request wakes it")
    max: int = Field(default=1, ge=0)
    target_queue_wait_s: float = Field(default=1.0, gt=0, description="prefill: most predicted wait for a group [s]")
    target_utilisation: float = Field(default=0.75, gt=0, le=1, description="prefill: part of the time that groups may be busy")
    target_itl_ms: float | None = Field(default=None, gt=0, description="decode: most time between tokens; unset = max_batch bounds")
    target_kv_use: float = Field(default=0.85, gt=0, le=1, description="decode: part of the KV blocks that may be allotted")
    up_delay_s: float = Field(default=0.0, ge=0, description="a need for more groups must last so long")
    down_delay_s: float = Field(default=300.0, ge=0, description="less must have been enough, with margin, for so long")

    @model_validator(mode="after")
    def _ordered(self) -> ReplicasNode:
        if self.max < max(self.min, 1):
            raise ValueError(f"replicas max {self.max} must be at least 1 and not below min {self.min}")
        return self


class PoolNode(Node):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="DNS label")
    role: Literal["prefill", "decode"]
    layout: LayoutNode = LayoutNode()
    weights: Literal["mxfp4", "fp8", "bf16"] = Field(
        default="mxfp4", description="format of the experts; fp8 needs `tandem convert`; on cuda: prefill fp8, decode mxfp4 or fp8"
    )
    max_batch: int = Field(default=128, ge=1, le=1024, description="decode: sequences per step")
    chunk_tokens: int = Field(default=8192, ge=16, description="prefill: most tokens per forward")
    kv_blocks: int | None = Field(default=None, ge=16, description="KV blocks of the full layers; unset = from free memory")
    replicas: ReplicasNode = ReplicasNode()
    node_labels: dict[str, str] = Field(default={}, description="Ray node labels that a group's node must have")
    usd_per_gpu_hour: float | None = Field(default=None, gt=0, description="unset = prices.usd_per_gpu_hour")

    @model_validator(mode="after")
    def _role_fits(self) -> PoolNode:
        if self.role == "decode" and self.layout.tp > 8:
            raise ValueError("decode tp must be 1, 2, 4 or 8")
        return self


class PricesNode(Node):
    usd_per_gpu_hour: float = Field(default=3.0, gt=0)


class KVNode(Node):
    block_size: Literal[16, 32, 64] = Field(default=16, description="tokens per KV block")
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    transport: Literal["auto", "shm", "tcp", "nixl", "cuda_ipc", "nccl"] = "auto"
    lease_s: float = Field(default=10.0, gt=0, description="a transfer without a heartbeat for this long is given up")


class QueueNode(Node):
    max_requests: int = Field(default=1024, ge=1)
    max_prompt_tokens: int = Field(default=8_000_000, ge=1)
    max_wait_s: float = Field(default=30.0, gt=0)


class ObjectiveNode(Node):
    latency_weight: float = Field(default=0.5, ge=0, le=1, description="1 buys speed, 0 saves money")


class RetryNode(Node):
    """A request whose group died is tried elsewhere, once by default. What pools may be asked in all keeps failures from multiplying."""

    max_per_request: int = Field(default=1, ge=0, description="fresh attempts after a group died that had begun on the request")
    ratio: float = Field(default=0.2, ge=0, description="retries that each request to a pool pays for")
    burst: int = Field(default=256, ge=0, description="retries that a pool's groups may cause beyond that, all at once")
    patience_s: float = Field(default=0.25, ge=0, description="a request waits so long for the first healthy group of a pool that has none")


class LivenessNode(Node):
    """When the router gives a group up. A group whose processes are gone is known by its broken connection, long before these times."""

    poll_s: float = Field(default=0.2, gt=0, description="how often each group is asked for its load")
    poll_timeout_s: float = Field(default=2.0, gt=0, description="a poll that is not answered by then counts as silence")
    max_silent_polls: int = Field(default=4, ge=2, description="in a row, then the group is lost; after half as many it gets nothing new")
    reconnect_s: float = Field(default=0.7, gt=0, description="a token stream that broke may come back within this time")


class RouterNode(Node):
    listen: str = Field(default="127.0.0.1:50051", description="host:port of the gRPC server; port 0 = any free one")
    objective: ObjectiveNode = ObjectiveNode()
    queue: QueueNode = QueueNode()
    profile: Path | None = Field(default=None, description="file that `tandem sweep` wrote; unset = the built-in default")
    default_deadline_s: float = Field(default=600.0, gt=0, description="for requests whose client set none")
    stream_buffer_tokens: int = Field(default=4096, ge=64, description="tokens a slow client may lag behind before its request fails")
    drain_s: float = Field(default=120.0, ge=0, description="after SIGTERM running requests have so long to finish; then a typed error")
    retry: RetryNode = RetryNode()
    liveness: LivenessNode = LivenessNode()
    lease_s: float = Field(default=3.0, gt=0, description="groups end the requests of a router whose token stream was away for this long")


class AutoscaleNode(Node):
    mode: Literal["on", "dry_run", "off"] = Field(default="on", description="dry_run logs what it would do; off leaves pools at min")
    interval_s: float = Field(default=5.0, gt=0, description="between two decisions")
    gpu_budget: int = Field(default=8, ge=1, description="most GPUs of all pools together, also while groups are replaced")


class ClusterNode(Node):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="activations; float32 for parity on a CPU")
    key_file: Path | None = Field(
        default=None, description="signs transfer messages; one key per line, the first signs; unset = made at start"
    )
    controller_listen: str = Field(default="127.0.0.1:0", description="host:port of the controller's directory")
    ray_address: str | None = Field(default=None, description="existing Ray cluster; unset = start a local one")
    place_timeout_s: float = Field(default=60.0, gt=0, description="a group that no node can hold fails then; more where nodes are added")
    start_timeout_s: float = Field(default=300.0, gt=0, description="for a group, once it has its place")
    drain_grace_s: float = Field(default=30.0, ge=0, description="running requests of what is drained have so long to finish")
    health_timeout_s: float = Field(default=15.0, gt=0, description="a group whose leader is silent for so long is replaced")


class TlsNode(Node):
    """PEM files, the same paths on every host. They may be replaced at any time: new connections use the new ones."""

    ca_file: Path = Field(description="whose certificates are believed")
    cert_file: Path = Field(description="this host's certificate, with intermediate ones after it")
    key_file: Path
    mutual: Literal["all", "internal", "none"] = Field(
        default="internal", description="who must show a certificate: also the router's clients; other processes of the cluster; nobody"
    )
    peer_name: str | None = Field(default=None, description="name that every server's certificate holds; unset = the host called")


class SecurityNode(Node):
    tls: TlsNode | None = Field(default=None, description="of all gRPC; unset = plain")
    tokens_file: Path | None = Field(
        default=None, description="YAML list of {token or sha256, name, role: client or operator}; set = no call without a token"
    )


class MetricsNode(Node):
    """Every process serves /metrics; the controller's /targets lists them all for Prometheus (`http_sd_configs`)."""

    host: str = Field(default="127.0.0.1", description="address that /metrics listens on, without authentication; 0.0.0.0 = all")
    controller_port: int = Field(default=0, ge=0, le=65535, description="0 = any free one")
    router_port: int = Field(default=0, ge=0, le=65535, description="0 = any free one")
    group_port: int = Field(default=0, ge=0, le=65535, description="groups of one host take this one or the next; 0 = any free one")


class FrontendNode(Node):
    """HTTP and gRPC for chats. `tandem frontend` runs one; `tandem up` starts one too if `listen` is set."""

    listen: str | None = Field(default=None, description="host:port of HTTP; unset = `tandem up` starts none, `tandem frontend` takes 8000")
    grpc_listen: str | None = Field(default=None, description="host:port of tandem.chat.v1.Chat; unset = none")
    https: bool = Field(default=False, description="HTTP and gRPC with the certificate of security.tls")
    model_names: tuple[str, ...] = Field(default=(), description="names that requests may give; empty = the router's own")
    keys_file: Path | None = Field(default=None, description="YAML list of {key, name, priority, max_running}; unset = open")
    cors_origins: tuple[str, ...] = Field(default=(), description="origins that browsers may call from; empty = none")
    max_body_bytes: int = Field(default=4 << 20, ge=1024, description="of one request")
    max_chars: int = Field(default=2_000_000, ge=1, description="characters of one request, all texts together")
    max_streams: int = Field(default=4096, ge=1, description="requests served at once; more are answered 429")
    stalled_client_s: float = Field(default=30.0, gt=0, description="a client that takes nothing for so long counts as gone")
    default_deadline_s: float = Field(default=600.0, gt=0, description="for requests that name none")
    drain_s: float = Field(default=120.0, ge=0, description="after SIGTERM running replies have so long to finish")
    includes_date: bool = Field(default=True, description="today's date stands in the prompt")
    encoder_threads: int = Field(default=4, ge=1, description="threads that render and encode, outside of the event loop")
    token_file: Path | None = Field(default=None, description="bearer token towards the router, where security.tokens_file asks for one")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="on metrics.host; 0 = any free one")


class TracingNode(Node):
    exporter: Literal["none", "otlp", "file"] = Field(default="none", description="otlp sends to a collector; file writes JSON lines")
    target: str = Field(default="http://127.0.0.1:4318", description="the collector's URL (OTLP over HTTP); for file: a folder")
    sample_ratio: float = Field(default=1.0, ge=0, le=1, description="of requests that bring no trace context of their own")


class Config(Node):
    model: ModelNode
    pools: tuple[PoolNode, ...] = Field(min_length=1)
    prices: PricesNode = PricesNode()
    kv: KVNode = KVNode()
    router: RouterNode = RouterNode()
    autoscale: AutoscaleNode = AutoscaleNode()
    cluster: ClusterNode = ClusterNode()
    security: SecurityNode = SecurityNode()
    metrics: MetricsNode = MetricsNode()
    frontend: FrontendNode = FrontendNode()
    tracing: TracingNode = TracingNode()

    @field_validator("pools")
    @classmethod
    def _unique_names(cls, pools: tuple[PoolNode, ...]) -> tuple[PoolNode, ...]:
        names = [pool.name for pool in pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ: {names}")
        return pools

    @model_validator(mode="after")
    def _fits(self) -> Config:
        for role in ("prefill", "decode"):
            if not any(pool.role == role for pool in self.pools):
                raise ValueError(f"pools: no {role} pool; at least one of each role is needed")
        if self.security.tokens_file is not None and self.cluster.key_file is None:
            raise ValueError("security.tokens_file needs cluster.key_file: processes of the cluster prove themselves with that key")
        if self.frontend.https and self.security.tls is None:
            raise ValueError("frontend.https needs security.tls: its certificate is served")
        wanted = sum(pool.replicas.min * pool.layout.tp for pool in self.pools)
        if wanted > self.autoscale.gpu_budget:
            raise ValueError(f"pools want at least {wanted} GPUs, autoscale.gpu_budget is {self.autoscale.gpu_budget}")
        return self

    def usd_per_gpu_hour(self, pool: PoolNode) -> float:
        return pool.usd_per_gpu_hour or self.prices.usd_per_gpu_hour


def parse_config(tree: Any, overrides: tuple[str, ...] | list[str] = ()) -> Config:
    """Builds the tree from plain data and `a.b=c` overrides (values are YAML; list items by index or, for pools, by name).

    Raises: ConfigError with every wrong key on one line
    """
    if not isinstance(tree, dict):
        raise ConfigError(f"config: expected a mapping at the top, got {type(tree).__name__}")
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        parts = [".".join(str(p) for p in e["loc"]) + ": " + e["msg"].removeprefix("Value error, ") for e in exc.errors()]
        raise ConfigError("config: " + "; ".join(parts)) from None


def load_config(path: Path, overrides: tuple[str, ...] | list[str] = ()) -> Config:
    """Reads one YAML file. Relative paths in it are taken from the current directory, and `~` from the home: absolute from then on, since
    other processes that are handed the tree stand elsewhere.

    Raises: ConfigError naming the file and the key
    """
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"config {path}: {' '.join(str(exc).split())}") from exc
    return _anchored(parse_config(tree, overrides))


def _anchored(value: Any) -> Any:
    if isinstance(value, Path):
        return Path.cwd() / value.expanduser()
    if isinstance(value, list | tuple):
        return type(value)(map(_anchored, value))
    if isinstance(value, Node):
        return value.model_copy(update={name: _anchored(getattr(value, name)) for name in value.model_fields_set})
    return value


def _apply_override(tree: dict, override: str) -> None:
    key, eq, text = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"--set {override!r}: expected key.path=value")
    node: Any = tree
    parts = key.split(".")
    for part in parts[:-1]:
        node = _child(node, part, key)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ConfigError(f"--set {key}: {text!r} is not a YAML value") from exc
    if isinstance(node, list):
        node[_index(node, parts[-1], key)] = value
    else:
        node[parts[-1]] = value


def _child(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, part, key)]
    if node.get(part) is None:
        node[part] = {}
    if not isinstance(node[part], dict | list):
        raise ConfigError(f"--set {key}: {part} is a value, not a section")
    return node[part]


def _index(items: list, part: str, key: str) -> int:
    for i, item in enumerate(items):
        if isinstance(item, dict) and item.get("name") == part:
            return i
    if part.isdigit() and int(part) < len(items):
        return int(part)
    raise ConfigError(f"--set {key}: no item {part!r}; there are {len(items)}")
