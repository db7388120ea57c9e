from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_KIND_UNSPECIFIED: _ClassVar[FrameKind]
    FRAME_KIND_HELLO: _ClassVar[FrameKind]
    FRAME_KIND_HIDDEN: _ClassVar[FrameKind]
    FRAME_KIND_GRAD: _ClassVar[FrameKind]
    FRAME_KIND_HEAD: _ClassVar[FrameKind]
    FRAME_KIND_BYE: _ClassVar[FrameKind]
    FRAME_KIND_UNIT_GRAD: _ClassVar[FrameKind]
    FRAME_KIND_PAIRS: _ClassVar[FrameKind]
    FRAME_KIND_WEIGHTS: _ClassVar[FrameKind]
    FRAME_KIND_REPLICA_GRAD: _ClassVar[FrameKind]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_INT8_ROWS: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_BYTES: _ClassVar[DType]
FRAME_KIND_UNSPECIFIED: FrameKind
FRAME_KIND_HELLO: FrameKind
FRAME_KIND_HIDDEN: FrameKind
FRAME_KIND_GRAD: FrameKind
FRAME_KIND_HEAD: FrameKind
FRAME_KIND_BYE: FrameKind
FRAME_KIND_UNIT_GRAD: FrameKind
FRAME_KIND_PAIRS: FrameKind
FRAME_KIND_WEIGHTS: FrameKind
FRAME_KIND_REPLICA_GRAD: FrameKind
DTYPE_UNSPECIFIED: DType
DTYPE_FLOAT32: DType
DTYPE_BFLOAT16: DType
DTYPE_FLOAT16: DType
DTYPE_INT8_ROWS: DType
DTYPE_FLOAT64: DType
DTYPE_BYTES: DType

class Frame(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: FrameHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[FrameHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("run_id", "placement_number", "kind", "source", "seq", "micro", "boundary", "dtype", "shape", "payload_bytes", "mask_bytes", "crc32", "plan_digest", "padding", "exponent", "sent_unix_s", "link", "is_reopened")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    MICRO_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MASK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    IS_REOPENED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    placement_number: int
    kind: FrameKind
    source: str
    seq: int
    micro: int
    boundary: int
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    payload_bytes: int
    mask_bytes: int
    crc32: int
    plan_digest: str
    padding: bytes
    exponent: int
    sent_unix_s: float
    link: str
    is_reopened: bool
    def __init__(self, run_id: _Optional[str] = ..., placement_number: _Optional[int] = ..., kind: _Optional[_Union[FrameKind, str]] = ..., source: _Optional[str] = ..., seq: _Optional[int] = ..., micro: _Optional[int] = ..., boundary: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., payload_bytes: _Optional[int] = ..., mask_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., plan_digest: _Optional[str] = ..., padding: _Optional[bytes] = ..., exponent: _Optional[int] = ..., sent_unix_s: _Optional[float] = ..., link: _Optional[str] = ..., is_reopened: _Optional[bool] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("credits", "boundary", "refusal", "error", "welcome", "counts", "received", "total_credits")
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_CREDITS_FIELD_NUMBER: _ClassVar[int]
    credits: int
    boundary: int
    refusal: str
    error: str
    welcome: bool
    counts: bool
    received: int
    total_credits: int
    def __init__(self, credits: _Optional[int] = ..., boundary: _Optional[int] = ..., refusal: _Optional[str] = ..., error: _Optional[str] = ..., welcome: _Optional[bool] = ..., counts: _Optional[bool] = ..., received: _Optional[int] = ..., total_credits: _Optional[int] = ...) -> None: ...
