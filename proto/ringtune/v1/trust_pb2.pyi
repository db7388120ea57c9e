from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
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
    __slots__ = ("certificate_pem",)
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    certificate_pem: bytes
    def __init__(self, certificate_pem: _Optional[bytes] = ...) -> None: ...

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
