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
    __slots__ = ("version", "groups", "dead_incarnations")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEAD_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    version: int
    groups: _containers.RepeatedCompositeFieldContainer[_types_pb2.GroupDescription]
    dead_incarnations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[_types_pb2.GroupDescription, _Mapping]]] = ..., dead_incarnations: _Optional[_Iterable[int]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "replicas")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: int
    def __init__(self, replicas: _Optional[int] = ...) -> None: ...
