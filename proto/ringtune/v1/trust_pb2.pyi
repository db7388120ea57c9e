from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AuthorityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AuthorityReply(_message.Message):
    __slots__ = ("authority_pem",)
    AUTHORITY_PEM_FIELD_NUMBER: _ClassVar[int]
    authority_pem: bytes
    def __init__(self, authority_pem: _Optional[bytes] = ...) -> None: ...

class CertifyRequest(_message.Message):
    __slots__ = ("secret", "request_pem")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    secret: str
    request_pem: bytes
    def __init__(self, secret: _Optional[str] = ..., request_pem: _Optional[bytes] = ...) -> None: ...

class CertifyReply(_message.Message):
    __slots__ = ("certificate_pem", "authorities_pem")
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    authorities_pem: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, certificate_pem: _Optional[bytes] = ..., authorities_pem: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request_pem",)
    REQUEST_PEM_FIELD_NUMBER: _ClassVar[int]
    request_pem: bytes
    def __init__(self, request_pem: _Optional[bytes] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("node", "role", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    reason: str
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RemoveReply(_message.Message):
    __slots__ = ("certificates", "was_member")
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    WAS_MEMBER_FIELD_NUMBER: _ClassVar[int]
    certificates: int
    was_member: bool
    def __init__(self, certificates: _Optional[int] = ..., was_member: _Optional[bool] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node", "undo")
    NODE_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    node: str
    undo: bool
    def __init__(self, node: _Optional[str] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainNodeReply(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class RotateRequest(_message.Message):
    __slots__ = ("within_s", "only_looks")
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    ONLY_LOOKS_FIELD_NUMBER: _ClassVar[int]
    within_s: float
    only_looks: bool
    def __init__(self, within_s: _Optional[float] = ..., only_looks: _Optional[bool] = ...) -> None: ...

class RotateReply(_message.Message):
    __slots__ = ("phase", "old_sha256", "new_sha256", "began_unix_s", "issues_unix_s", "ends_unix_s", "unconfirmed", "waiting", "folder", "problem")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OLD_SHA256_FIELD_NUMBER: _ClassVar[int]
    NEW_SHA256_FIELD_NUMBER: _ClassVar[int]
    BEGAN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ISSUES_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    phase: str
    old_sha256: str
    new_sha256: str
    began_unix_s: float
    issues_unix_s: float
    ends_unix_s: float
    unconfirmed: _containers.RepeatedScalarFieldContainer[str]
    waiting: _containers.RepeatedScalarFieldContainer[str]
    folder: str
    problem: str
    def __init__(self, phase: _Optional[str] = ..., old_sha256: _Optional[str] = ..., new_sha256: _Optional[str] = ..., began_unix_s: _Optional[float] = ..., issues_unix_s: _Optional[float] = ..., ends_unix_s: _Optional[float] = ..., unconfirmed: _Optional[_Iterable[str]] = ..., waiting: _Optional[_Iterable[str]] = ..., folder: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...
