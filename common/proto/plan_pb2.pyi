from common.proto import types_pb2 as _types_pb2
from common.proto import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankHello(_message.Message):
    __slots__ = ("process", "kv_bytes")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    process: _types_pb2.ProcessIdentity
    kv_bytes: int
    def __init__(self, process: _Optional[_Union[_types_pb2.ProcessIdentity, _Mapping]] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class GroupFacts(_message.Message):
    __slots__ = ("full_blocks", "sliding_blocks", "ranks", "leader_address")
    FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    full_blocks: int
    sliding_blocks: int
    ranks: _containers.RepeatedCompositeFieldContainer[_types_pb2.ProcessIdentity]
    leader_address: str
    def __init__(self, full_blocks: _Optional[int] = ..., sliding_blocks: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[_types_pb2.ProcessIdentity, _Mapping]]] = ..., leader_address: _Optional[str] = ...) -> None: ...

class RankReady(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Endpoint]
    def __init__(self, endpoints: _Optional[_Iterable[_Union[_worker_pb2.Endpoint, _Mapping]]] = ...) -> None: ...

class SequenceView(_message.Message):
    __slots__ = ("token_ids", "start", "full_blocks", "sliding_first", "sliding_blocks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_FIRST_FIELD_NUMBER: _ClassVar[int]
    SLIDING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    full_blocks: _containers.RepeatedScalarFieldContainer[int]
    sliding_first: int
    sliding_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., full_blocks: _Optional[_Iterable[int]] = ..., sliding_first: _Optional[int] = ..., sliding_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class BeginPush(_message.Message):
    __slots__ = ("reservation", "num_tokens", "full_blocks", "deadline_ms")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    reservation: _worker_pb2.Reservation
    num_tokens: int
    full_blocks: _containers.RepeatedScalarFieldContainer[int]
    deadline_ms: int
    def __init__(self, reservation: _Optional[_Union[_worker_pb2.Reservation, _Mapping]] = ..., num_tokens: _Optional[int] = ..., full_blocks: _Optional[_Iterable[int]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PrefillChunk(_message.Message):
    __slots__ = ("view", "transfer_id", "is_last")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    view: SequenceView
    transfer_id: int
    is_last: bool
    def __init__(self, view: _Optional[_Union[SequenceView, _Mapping]] = ..., transfer_id: _Optional[int] = ..., is_last: bool = ...) -> None: ...

class PrefillPlan(_message.Message):
    __slots__ = ("stops", "begin", "chunk", "shut_down")
    STOPS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SHUT_DOWN_FIELD_NUMBER: _ClassVar[int]
    stops: _containers.RepeatedScalarFieldContainer[int]
    begin: BeginPush
    chunk: PrefillChunk
    shut_down: bool
    def __init__(self, stops: _Optional[_Iterable[int]] = ..., begin: _Optional[_Union[BeginPush, _Mapping]] = ..., chunk: _Optional[_Union[PrefillChunk, _Mapping]] = ..., shut_down: bool = ...) -> None: ...

class PrefillReply(_message.Message):
    __slots__ = ("error_status", "error_message")
    ERROR_STATUS_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error_status: str
    error_message: str
    def __init__(self, error_status: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("transfer_id", "num_tokens", "blocks", "full_blocks", "sliding_ring", "key_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FULL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLIDING_RING_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    num_tokens: int
    blocks: _containers.RepeatedCompositeFieldContainer[_worker_pb2.BlockList]
    full_blocks: _containers.RepeatedScalarFieldContainer[int]
    sliding_ring: _containers.RepeatedScalarFieldContainer[int]
    key_id: int
    def __init__(self, transfer_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[_worker_pb2.BlockList, _Mapping]]] = ..., full_blocks: _Optional[_Iterable[int]] = ..., sliding_ring: _Optional[_Iterable[int]] = ..., key_id: _Optional[int] = ...) -> None: ...

class DecodeRow(_message.Message):
    __slots__ = ("transfer_id", "token_id", "position", "follows")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    token_id: int
    position: int
    follows: bool
    def __init__(self, transfer_id: _Optional[int] = ..., token_id: _Optional[int] = ..., position: _Optional[int] = ..., follows: bool = ...) -> None: ...

class DecodePlan(_message.Message):
    __slots__ = ("revokes", "releases", "grants", "verifies", "rows", "shut_down", "sampled")
    REVOKES_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHUT_DOWN_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    revokes: _containers.RepeatedScalarFieldContainer[int]
    releases: _containers.RepeatedScalarFieldContainer[int]
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    verifies: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedCompositeFieldContainer[DecodeRow]
    shut_down: bool
    sampled: bool
    def __init__(self, revokes: _Optional[_Iterable[int]] = ..., releases: _Optional[_Iterable[int]] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ..., verifies: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[_Union[DecodeRow, _Mapping]]] = ..., shut_down: bool = ..., sampled: bool = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("transfer_id", "bytes", "digest")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    bytes: int
    digest: int
    def __init__(self, transfer_id: _Optional[int] = ..., bytes: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("transfer_id", "status", "message")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: int
    status: str
    message: str
    def __init__(self, transfer_id: _Optional[int] = ..., status: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DecodeReply(_message.Message):
    __slots__ = ("fenced", "verified", "failures", "unverified")
    FENCED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    fenced: _containers.RepeatedScalarFieldContainer[int]
    verified: _containers.RepeatedCompositeFieldContainer[VerifyResult]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    unverified: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fenced: _Optional[_Iterable[int]] = ..., verified: _Optional[_Iterable[_Union[VerifyResult, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., unverified: _Optional[_Iterable[int]] = ...) -> None: ...
