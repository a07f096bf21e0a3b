from common.proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Work(_message.Message):
    __slots__ = ("internal_id", "label", "prompt_ids", "output_ids", "sampling", "deadline_ms", "traceparent")
    INTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    internal_id: str
    label: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    deadline_ms: int
    traceparent: str
    def __init__(self, internal_id: _Optional[str] = ..., label: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class BlockList(_message.Message):
    __slots__ = ("sliding", "first_logical", "block_ids", "epochs")
    SLIDING_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGICAL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    sliding: bool
    first_logical: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sliding: bool = ..., first_logical: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("transport", "detail")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    transport: str
    detail: bytes
    def __init__(self, transport: _Optional[str] = ..., detail: _Optional[bytes] = ...) -> None: ...

class RankEndpoints(_message.Message):
    __slots__ = ("rank", "endpoints")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    def __init__(self, rank: _Optional[int] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("internal_id", "transfer_id", "incarnation", "decode_address", "layout", "kv", "blocks", "ranks", "lease_ms", "key_id", "mac")
    INTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    internal_id: str
    transfer_id: int
    incarnation: int
    decode_address: str
    layout: _types_pb2.Layout
    kv: _types_pb2.KVGeometry
    blocks: _containers.RepeatedCompositeFieldContainer[BlockList]
    ranks: _containers.RepeatedCompositeFieldContainer[RankEndpoints]
    lease_ms: int
    key_id: int
    mac: bytes
    def __init__(self, internal_id: _Optional[str] = ..., transfer_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., decode_address: _Optional[str] = ..., layout: _Optional[_Union[_types_pb2.Layout, _Mapping]] = ..., kv: _Optional[_Union[_types_pb2.KVGeometry, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockList, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankEndpoints, _Mapping]]] = ..., lease_ms: _Optional[int] = ..., key_id: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("work", "router_id", "writer", "incarnation")
    WORK_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    work: Work
    router_id: str
    writer: _types_pb2.GroupDescription
    incarnation: int
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ..., router_id: _Optional[str] = ..., writer: _Optional[_Union[_types_pb2.GroupDescription, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("transfer_ids", "incarnation")
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    transfer_ids: _containers.RepeatedScalarFieldContainer[int]
    incarnation: int
    def __init__(self, transfer_ids: _Optional[_Iterable[int]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("unknown_ids",)
    UNKNOWN_IDS_FIELD_NUMBER: _ClassVar[int]
    unknown_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "first_token", "first_logprobs", "bytes_per_rank", "digest_per_rank", "mac")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    incarnation: int
    first_token: int
    first_logprobs: _types_pb2.TokenLogprobs
    bytes_per_rank: _containers.RepeatedScalarFieldContainer[int]
    digest_per_rank: _containers.RepeatedScalarFieldContainer[int]
    mac: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., first_token: _Optional[int] = ..., first_logprobs: _Optional[_Union[_types_pb2.TokenLogprobs, _Mapping]] = ..., bytes_per_rank: _Optional[_Iterable[int]] = ..., digest_per_rank: _Optional[_Iterable[int]] = ..., mac: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "reason", "mac")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    incarnation: int
    reason: str
    mac: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ..., mac: _Optional[bytes] = ...) -> None: ...

class AbandonReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WritersDiedRequest(_message.Message):
    __slots__ = ("incarnations", "mac")
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    mac: bytes
    def __init__(self, incarnations: _Optional[_Iterable[int]] = ..., mac: _Optional[bytes] = ...) -> None: ...

class WritersDiedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("internal_id", "reason")
    INTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    internal_id: str
    reason: str
    def __init__(self, internal_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: bool = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("internal_id", "first_index", "token_ids", "logprobs", "finish", "error_status", "error_message")
    INTERNAL_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    internal_id: str
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    finish: _types_pb2.Finish
    error_status: str
    error_message: str
    def __init__(self, internal_id: _Optional[str] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[_types_pb2.Finish, _Mapping]] = ..., error_status: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...

class StepFrame(_message.Message):
    __slots__ = ("step", "outputs", "load")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    load: _types_pb2.GroupLoad
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.GroupLoad, _Mapping]] = ...) -> None: ...

class PrefillTask(_message.Message):
    __slots__ = ("work", "reservation")
    WORK_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    work: Work
    reservation: Reservation
    def __init__(self, work: _Optional[_Union[Work, _Mapping]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("started", "first_token", "handed_over")
    class Started(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class FirstToken(_message.Message):
        __slots__ = ("output", "prefill_ms")
        OUTPUT_FIELD_NUMBER: _ClassVar[int]
        PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
        output: SequenceOutput
        prefill_ms: float
        def __init__(self, output: _Optional[_Union[SequenceOutput, _Mapping]] = ..., prefill_ms: _Optional[float] = ...) -> None: ...
    class HandedOver(_message.Message):
        __slots__ = ("transfer_ms", "bytes")
        TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        transfer_ms: float
        bytes: int
        def __init__(self, transfer_ms: _Optional[float] = ..., bytes: _Optional[int] = ...) -> None: ...
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    started: PrefillEvent.Started
    first_token: PrefillEvent.FirstToken
    handed_over: PrefillEvent.HandedOver
    def __init__(self, started: _Optional[_Union[PrefillEvent.Started, _Mapping]] = ..., first_token: _Optional[_Union[PrefillEvent.FirstToken, _Mapping]] = ..., handed_over: _Optional[_Union[PrefillEvent.HandedOver, _Mapping]] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "mac")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    incarnation: int
    mac: bytes
    def __init__(self, transfer_id: _Optional[int] = ..., incarnation: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class FenceReply(_message.Message):
    __slots__ = ("stopped",)
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    def __init__(self, stopped: bool = ...) -> None: ...

class TransportUse(_message.Message):
    __slots__ = ("transport", "bytes", "seconds")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    bytes: int
    seconds: float
    def __init__(self, transport: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class PushReport(_message.Message):
    __slots__ = ("transfer_id", "rank", "error", "error_status", "bytes_per_rank", "digest_per_rank", "uses")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_STATUS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    rank: int
    error: str
    error_status: str
    bytes_per_rank: _containers.RepeatedScalarFieldContainer[int]
    digest_per_rank: _containers.RepeatedScalarFieldContainer[int]
    uses: _containers.RepeatedCompositeFieldContainer[TransportUse]
    def __init__(self, transfer_id: _Optional[int] = ..., rank: _Optional[int] = ..., error: _Optional[str] = ..., error_status: _Optional[str] = ..., bytes_per_rank: _Optional[_Iterable[int]] = ..., digest_per_rank: _Optional[_Iterable[int]] = ..., uses: _Optional[_Iterable[_Union[TransportUse, _Mapping]]] = ...) -> None: ...

class PushReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("drain",)
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    drain: bool
    def __init__(self, drain: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
