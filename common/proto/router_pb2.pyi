from common.proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PoolState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOL_STATE_UNSPECIFIED: _ClassVar[PoolState]
    POOL_STATE_ACTIVE: _ClassVar[PoolState]
    POOL_STATE_DRAINING: _ClassVar[PoolState]
POOL_STATE_UNSPECIFIED: PoolState
POOL_STATE_ACTIVE: PoolState
POOL_STATE_DRAINING: PoolState

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "tokenized", "sampling_params", "slo", "priority", "latency_weight", "explain")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    LATENCY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokenized: _types_pb2.TokenizedInput
    sampling_params: _types_pb2.SamplingParams
    slo: _types_pb2.Slo
    priority: int
    latency_weight: float
    explain: bool
    def __init__(self, request_id: _Optional[str] = ..., tokenized: _Optional[_Union[_types_pb2.TokenizedInput, _Mapping]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., slo: _Optional[_Union[_types_pb2.Slo, _Mapping]] = ..., priority: _Optional[int] = ..., latency_weight: _Optional[float] = ..., explain: bool = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("index", "first_token_index", "token_ids", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    first_token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    def __init__(self, index: _Optional[int] = ..., first_token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ...) -> None: ...

class GenerateComplete(_message.Message):
    __slots__ = ("index", "finish_reason", "usage", "route")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: _types_pb2.Finish
    usage: _types_pb2.Usage
    route: RouteReport
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., route: _Optional[_Union[RouteReport, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "chunk", "complete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    chunk: GenerateChunk
    complete: GenerateComplete
    def __init__(self, request_id: _Optional[str] = ..., chunk: _Optional[_Union[GenerateChunk, _Mapping]] = ..., complete: _Optional[_Union[GenerateComplete, _Mapping]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "transfer_ms", "ttft_ms", "itl_ms", "gpu_seconds", "cost_usd", "latency_s", "score")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COST_USD_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    ttft_ms: float
    itl_ms: float
    gpu_seconds: float
    cost_usd: float
    latency_s: float
    score: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., itl_ms: _Optional[float] = ..., gpu_seconds: _Optional[float] = ..., cost_usd: _Optional[float] = ..., latency_s: _Optional[float] = ..., score: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("prefill_pool", "decode_pool", "prefill_group", "decode_group", "prediction", "chosen", "reason")
    PREFILL_POOL_FIELD_NUMBER: _ClassVar[int]
    DECODE_POOL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_GROUP_FIELD_NUMBER: _ClassVar[int]
    DECODE_GROUP_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill_pool: str
    decode_pool: str
    prefill_group: str
    decode_group: str
    prediction: Prediction
    chosen: bool
    reason: str
    def __init__(self, prefill_pool: _Optional[str] = ..., decode_pool: _Optional[str] = ..., prefill_group: _Optional[str] = ..., decode_group: _Optional[str] = ..., prediction: _Optional[_Union[Prediction, _Mapping]] = ..., chosen: bool = ..., reason: _Optional[str] = ...) -> None: ...

class RouteDecision(_message.Message):
    __slots__ = ("candidates", "latency_weight", "expected_output_tokens", "seed")
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    LATENCY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    latency_weight: float
    expected_output_tokens: int
    seed: int
    def __init__(self, candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., latency_weight: _Optional[float] = ..., expected_output_tokens: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...

class RouteReport(_message.Message):
    __slots__ = ("decision", "actual", "attempts")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    decision: RouteDecision
    actual: Prediction
    attempts: int
    def __init__(self, decision: _Optional[_Union[RouteDecision, _Mapping]] = ..., actual: _Optional[_Union[Prediction, _Mapping]] = ..., attempts: _Optional[int] = ...) -> None: ...

class CallStart(_message.Message):
    __slots__ = ("request", "timeout_ms", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    timeout_ms: int
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, request: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CallItem(_message.Message):
    __slots__ = ("call_id", "start", "cancel")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    start: CallStart
    cancel: bool
    def __init__(self, call_id: _Optional[int] = ..., start: _Optional[_Union[CallStart, _Mapping]] = ..., cancel: bool = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "details", "trailing_metadata")
    class TrailingMetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    TRAILING_METADATA_FIELD_NUMBER: _ClassVar[int]
    code: int
    details: str
    trailing_metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., details: _Optional[str] = ..., trailing_metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CallEvent(_message.Message):
    __slots__ = ("call_id", "route", "response", "end")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    route: bytes
    response: bytes
    end: CallEnd
    def __init__(self, call_id: _Optional[int] = ..., route: _Optional[bytes] = ..., response: _Optional[bytes] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[CallItem]
    def __init__(self, items: _Optional[_Iterable[_Union[CallItem, _Mapping]]] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[CallEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[CallEvent, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class PlanRouteRequest(_message.Message):
    __slots__ = ("prompt_tokens", "max_tokens", "slo", "latency_weight")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLO_FIELD_NUMBER: _ClassVar[int]
    LATENCY_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    max_tokens: int
    slo: _types_pb2.Slo
    latency_weight: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., slo: _Optional[_Union[_types_pb2.Slo, _Mapping]] = ..., latency_weight: _Optional[float] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("description", "load", "healthy")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    description: _types_pb2.GroupDescription
    load: _types_pb2.GroupLoad
    healthy: bool
    def __init__(self, description: _Optional[_Union[_types_pb2.GroupDescription, _Mapping]] = ..., load: _Optional[_Union[_types_pb2.GroupLoad, _Mapping]] = ..., healthy: bool = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("pool", "requests", "prompt_tokens", "predicted_wait_s")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    pool: str
    requests: int
    prompt_tokens: int
    predicted_wait_s: float
    def __init__(self, pool: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., predicted_wait_s: _Optional[float] = ...) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("groups", "queues", "running_requests")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    QUEUES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    queues: _containers.RepeatedCompositeFieldContainer[QueueStatus]
    running_requests: int
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., queues: _Optional[_Iterable[_Union[QueueStatus, _Mapping]]] = ..., running_requests: _Optional[int] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "role", "layout", "state", "groups", "gpus_per_group", "usd_per_gpu_hour", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GPUS_PER_GROUP_FIELD_NUMBER: _ClassVar[int]
    USD_PER_GPU_HOUR_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: _types_pb2.Role
    layout: _types_pb2.Layout
    state: PoolState
    groups: int
    gpus_per_group: int
    usd_per_gpu_hour: float
    weights: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., state: _Optional[_Union[PoolState, str]] = ..., groups: _Optional[int] = ..., gpus_per_group: _Optional[int] = ..., usd_per_gpu_hour: _Optional[float] = ..., weights: _Optional[str] = ...) -> None: ...

class ListPoolsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPoolsResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class SetPoolStateRequest(_message.Message):
    __slots__ = ("pool", "state")
    POOL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    state: PoolState
    def __init__(self, pool: _Optional[str] = ..., state: _Optional[_Union[PoolState, str]] = ...) -> None: ...

class SetPoolStateResponse(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: Pool
    def __init__(self, pool: _Optional[_Union[Pool, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "vocab_size", "max_model_len", "eos_token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "router_id", "uptime_s", "profile")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    version: str
    router_id: str
    uptime_s: float
    profile: str
    def __init__(self, version: _Optional[str] = ..., router_id: _Optional[str] = ..., uptime_s: _Optional[float] = ..., profile: _Optional[str] = ...) -> None: ...
