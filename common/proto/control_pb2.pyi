from common.proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("router_id", "metrics_address")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    metrics_address: str
    def __init__(self, router_id: _Optional[str] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class GroupSet(_message.Message):
    __slots__ = ("version", "groups", "dead_incarnations", "waking")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEAD_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    WAKING_FIELD_NUMBER: _ClassVar[int]
    version: int
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupDescription]
    dead_incarnations: _containers.RepeatedScalarFieldContainer[int]
    waking: _containers.RepeatedScalarFieldContainer[_types_pb2.Role]
    def __init__(self, version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.GroupDescription, _Mapping]]] = ..., dead_incarnations: _Optional[_Iterable[int]] = ..., waking: _Optional[_Iterable[_Union[_types_pb2.Role, str]]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool", "role", "wanted", "ready", "starting", "draining", "min", "max", "pinned", "error")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    pool: str
    role: _types_pb2.Role
    wanted: int
    ready: int
    starting: int
    draining: int
    min: int
    max: int
    pinned: bool
    error: str
    def __init__(self, pool: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., wanted: _Optional[int] = ..., ready: _Optional[int] = ..., starting: _Optional[int] = ..., draining: _Optional[int] = ..., min: _Optional[int] = ..., max: _Optional[int] = ..., pinned: bool = ..., error: _Optional[str] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("pool", "group", "state", "tp", "detail", "stale", "load")
    POOL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    pool: str
    group: str
    state: str
    tp: int
    detail: str
    stale: bool
    load: _types_pb2.GroupLoad
    def __init__(self, pool: _Optional[str] = ..., group: _Optional[str] = ..., state: _Optional[str] = ..., tp: _Optional[int] = ..., detail: _Optional[str] = ..., stale: bool = ..., load: _Optional[_Union[_types_pb2.GroupLoad, _Mapping]] = ...) -> None: ...

class ScaleChange(_message.Message):
    __slots__ = ("pool", "before", "after", "reason", "unix_s", "dry_run")
    POOL_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    pool: str
    before: int
    after: int
    reason: str
    unix_s: float
    dry_run: bool
    def __init__(self, pool: _Optional[str] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., reason: _Optional[str] = ..., unix_s: _Optional[float] = ..., dry_run: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("pools", "groups", "changes", "gpus_held", "gpu_budget", "waits_for")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    GPUS_HELD_FIELD_NUMBER: _ClassVar[int]
    GPU_BUDGET_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    changes: _containers.RepeatedCompositeFieldContainer[ScaleChange]
    gpus_held: int
    gpu_budget: int
    waits_for: str
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[ScaleChange, _Mapping]]] = ..., gpus_held: _Optional[int] = ..., gpu_budget: _Optional[int] = ..., waits_for: _Optional[str] = ...) -> None: ...

class PoolLoad(_message.Message):
    __slots__ = ("pool", "role", "groups", "waiting", "arrived_prefill_s", "queued_s", "running_s", "queue_wait_s", "sequences", "sequences_per_group", "itl_ms", "kv_blocks_used", "kv_blocks_total")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_PER_GROUP_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    role: _types_pb2.Role
    groups: int
    waiting: int
    arrived_prefill_s: float
    queued_s: float
    running_s: float
    queue_wait_s: float
    sequences: float
    sequences_per_group: float
    itl_ms: float
    kv_blocks_used: int
    kv_blocks_total: int
    def __init__(self, pool: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., groups: _Optional[int] = ..., waiting: _Optional[int] = ..., arrived_prefill_s: _Optional[float] = ..., queued_s: _Optional[float] = ..., running_s: _Optional[float] = ..., queue_wait_s: _Optional[float] = ..., sequences: _Optional[float] = ..., sequences_per_group: _Optional[float] = ..., itl_ms: _Optional[float] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("router_id", "pools", "groups")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolLoad]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, router_id: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolLoad, _Mapping]]] = ..., groups: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "replicas", "automatic")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    automatic: bool
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ..., automatic: bool = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    def __init__(self, replicas: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("target", "now")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    target: str
    now: bool
    def __init__(self, target: _Optional[str] = ..., now: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ("config_json", "allow_gap")
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ALLOW_GAP_FIELD_NUMBER: _ClassVar[int]
    config_json: str
    allow_gap: bool
    def __init__(self, config_json: _Optional[str] = ..., allow_gap: bool = ...) -> None: ...

class RolloutReply(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, groups: _Optional[_Iterable[str]] = ...) -> None: ...
