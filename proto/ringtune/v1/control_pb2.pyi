from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("node", "address", "version", "has_data", "memory_bytes", "device", "threads", "system", "instance", "is_guest", "train_rows", "eval_rows", "cores", "wire", "rack")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_DATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    IS_GUEST_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ROWS_FIELD_NUMBER: _ClassVar[int]
    EVAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    node: str
    address: str
    version: str
    has_data: bool
    memory_bytes: int
    device: str
    threads: int
    system: str
    instance: str
    is_guest: bool
    train_rows: int
    eval_rows: int
    cores: int
    wire: int
    rack: str
    def __init__(self, node: _Optional[str] = ..., address: _Optional[str] = ..., version: _Optional[str] = ..., has_data: _Optional[bool] = ..., memory_bytes: _Optional[int] = ..., device: _Optional[str] = ..., threads: _Optional[int] = ..., system: _Optional[str] = ..., instance: _Optional[str] = ..., is_guest: _Optional[bool] = ..., train_rows: _Optional[int] = ..., eval_rows: _Optional[int] = ..., cores: _Optional[int] = ..., wire: _Optional[int] = ..., rack: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("lease_s", "now_unix_s", "authorities_pem")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_PEM_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    now_unix_s: float
    authorities_pem: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_s: _Optional[float] = ..., now_unix_s: _Optional[float] = ..., authorities_pem: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node", "instance", "run_id", "rss_bytes", "sent_unix_s", "removals_version", "authorities_version")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_VERSION_FIELD_NUMBER: _ClassVar[int]
    node: str
    instance: str
    run_id: str
    rss_bytes: int
    sent_unix_s: float
    removals_version: str
    authorities_version: str
    def __init__(self, node: _Optional[str] = ..., instance: _Optional[str] = ..., run_id: _Optional[str] = ..., rss_bytes: _Optional[int] = ..., sent_unix_s: _Optional[float] = ..., removals_version: _Optional[str] = ..., authorities_version: _Optional[str] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "run_id", "now_unix_s", "removed", "removals_version", "authorities_pem")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_PEM_FIELD_NUMBER: _ClassVar[int]
    known: bool
    run_id: str
    now_unix_s: float
    removed: _containers.RepeatedCompositeFieldContainer[RemovedCertificate]
    removals_version: str
    authorities_pem: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, known: _Optional[bool] = ..., run_id: _Optional[str] = ..., now_unix_s: _Optional[float] = ..., removed: _Optional[_Iterable[_Union[RemovedCertificate, _Mapping]]] = ..., removals_version: _Optional[str] = ..., authorities_pem: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RemovedCertificate(_message.Message):
    __slots__ = ("reason", "role", "name", "generation")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    reason: str
    role: str
    name: str
    generation: int
    def __init__(self, reason: _Optional[str] = ..., role: _Optional[str] = ..., name: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node", "instance")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    instance: str
    def __init__(self, node: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class Number(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("seq", "step", "kind", "values", "at_unix_s")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    seq: int
    step: int
    kind: str
    values: _containers.RepeatedCompositeFieldContainer[Number]
    at_unix_s: float
    def __init__(self, seq: _Optional[int] = ..., step: _Optional[int] = ..., kind: _Optional[str] = ..., values: _Optional[_Iterable[_Union[Number, _Mapping]]] = ..., at_unix_s: _Optional[float] = ...) -> None: ...

class Traffic(_message.Message):
    __slots__ = ("seq", "target", "payload", "bytes")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    seq: int
    target: str
    payload: str
    bytes: int
    def __init__(self, seq: _Optional[int] = ..., target: _Optional[str] = ..., payload: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("action", "start_unix_s", "end_unix_s", "worked_s")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    START_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    END_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    WORKED_S_FIELD_NUMBER: _ClassVar[int]
    action: str
    start_unix_s: float
    end_unix_s: float
    worked_s: float
    def __init__(self, action: _Optional[str] = ..., start_unix_s: _Optional[float] = ..., end_unix_s: _Optional[float] = ..., worked_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run_id", "node", "steps", "turns_done", "traffic", "spans", "error", "message", "lost_peer", "recording", "saved", "number", "transfers", "scores", "copies", "instance", "kept", "trails", "notes", "cache_problem")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TURNS_DONE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOST_PEER_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    TRAILS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    node: str
    steps: _containers.RepeatedCompositeFieldContainer[StepReport]
    turns_done: _containers.RepeatedScalarFieldContainer[int]
    traffic: _containers.RepeatedCompositeFieldContainer[Traffic]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    error: str
    message: str
    lost_peer: str
    recording: str
    saved: _containers.RepeatedCompositeFieldContainer[Saved]
    number: int
    transfers: _containers.RepeatedCompositeFieldContainer[Transfer]
    scores: _containers.RepeatedCompositeFieldContainer[SubnetScores]
    copies: _containers.RepeatedCompositeFieldContainer[CopyDigest]
    instance: str
    kept: _containers.RepeatedCompositeFieldContainer[CopyDigest]
    trails: _containers.RepeatedCompositeFieldContainer[AuditTrail]
    notes: _containers.RepeatedScalarFieldContainer[str]
    cache_problem: str
    def __init__(self, run_id: _Optional[str] = ..., node: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[StepReport, _Mapping]]] = ..., turns_done: _Optional[_Iterable[int]] = ..., traffic: _Optional[_Iterable[_Union[Traffic, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., lost_peer: _Optional[str] = ..., recording: _Optional[str] = ..., saved: _Optional[_Iterable[_Union[Saved, _Mapping]]] = ..., number: _Optional[int] = ..., transfers: _Optional[_Iterable[_Union[Transfer, _Mapping]]] = ..., scores: _Optional[_Iterable[_Union[SubnetScores, _Mapping]]] = ..., copies: _Optional[_Iterable[_Union[CopyDigest, _Mapping]]] = ..., instance: _Optional[str] = ..., kept: _Optional[_Iterable[_Union[CopyDigest, _Mapping]]] = ..., trails: _Optional[_Iterable[_Union[AuditTrail, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., cache_problem: _Optional[str] = ...) -> None: ...

class AuditTrail(_message.Message):
    __slots__ = ("turn", "digests_json", "signature", "certificate_pem")
    TURN_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_JSON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_PEM_FIELD_NUMBER: _ClassVar[int]
    turn: int
    digests_json: str
    signature: bytes
    certificate_pem: bytes
    def __init__(self, turn: _Optional[int] = ..., digests_json: _Optional[str] = ..., signature: _Optional[bytes] = ..., certificate_pem: _Optional[bytes] = ...) -> None: ...

class AuditedTensor(_message.Message):
    __slots__ = ("payload", "seq", "micro", "boundary", "ticket")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    MICRO_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    payload: str
    seq: int
    micro: int
    boundary: int
    ticket: str
    def __init__(self, payload: _Optional[str] = ..., seq: _Optional[int] = ..., micro: _Optional[int] = ..., boundary: _Optional[int] = ..., ticket: _Optional[str] = ...) -> None: ...

class CopyDigest(_message.Message):
    __slots__ = ("turn", "unit", "sha256")
    TURN_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    turn: int
    unit: int
    sha256: str
    def __init__(self, turn: _Optional[int] = ..., unit: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class SubnetScores(_message.Message):
    __slots__ = ("turn", "owner", "batch_id", "block", "scores", "subnets", "values")
    TURN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BATCH_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    SUBNETS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    turn: int
    owner: str
    batch_id: int
    block: int
    scores: int
    subnets: int
    values: bytes
    def __init__(self, turn: _Optional[int] = ..., owner: _Optional[str] = ..., batch_id: _Optional[int] = ..., block: _Optional[int] = ..., scores: _Optional[int] = ..., subnets: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Transfer(_message.Message):
    __slots__ = ("source", "bytes", "seconds", "at_unix_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AT_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    source: str
    bytes: int
    seconds: float
    at_unix_s: float
    def __init__(self, source: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., at_unix_s: _Optional[float] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("turn", "step", "sha256", "bytes", "digests")
    TURN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    turn: int
    step: int
    sha256: str
    bytes: int
    digests: _containers.RepeatedCompositeFieldContainer[CopyDigest]
    def __init__(self, turn: _Optional[int] = ..., step: _Optional[int] = ..., sha256: _Optional[str] = ..., bytes: _Optional[int] = ..., digests: _Optional[_Iterable[_Union[CopyDigest, _Mapping]]] = ...) -> None: ...

class NodeEntry(_message.Message):
    __slots__ = ("joined", "state", "seen_s", "rss_bytes")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEEN_S_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    joined: JoinRequest
    state: str
    seen_s: float
    rss_bytes: int
    def __init__(self, joined: _Optional[_Union[JoinRequest, _Mapping]] = ..., state: _Optional[str] = ..., seen_s: _Optional[float] = ..., rss_bytes: _Optional[int] = ...) -> None: ...

class NodesReply(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeEntry]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeEntry, _Mapping]]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("job_toml", "plan_only", "num_nodes", "join_s", "resume_json", "profile_json", "plan_json", "microbatches", "wire_dtypes", "submitted_by", "rehearsal", "submission", "nodes", "initial")
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    PLAN_ONLY_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    JOIN_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_JSON_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPES_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_BY_FIELD_NUMBER: _ClassVar[int]
    REHEARSAL_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    INITIAL_FIELD_NUMBER: _ClassVar[int]
    job_toml: str
    plan_only: bool
    num_nodes: int
    join_s: float
    resume_json: str
    profile_json: str
    plan_json: str
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    wire_dtypes: _containers.RepeatedScalarFieldContainer[str]
    submitted_by: str
    rehearsal: bool
    submission: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    initial: FileChunk
    def __init__(self, job_toml: _Optional[str] = ..., plan_only: _Optional[bool] = ..., num_nodes: _Optional[int] = ..., join_s: _Optional[float] = ..., resume_json: _Optional[str] = ..., profile_json: _Optional[str] = ..., plan_json: _Optional[str] = ..., microbatches: _Optional[_Iterable[int]] = ..., wire_dtypes: _Optional[_Iterable[str]] = ..., submitted_by: _Optional[str] = ..., rehearsal: _Optional[bool] = ..., submission: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., initial: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class RunRef(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class RunsReply(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[KeptRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[KeptRun, _Mapping]]] = ...) -> None: ...

class KeptRun(_message.Message):
    __slots__ = ("record_json",)
    RECORD_JSON_FIELD_NUMBER: _ClassVar[int]
    record_json: str
    def __init__(self, record_json: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run_id", "wait", "without_files", "whole")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FILES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    wait: bool
    without_files: bool
    whole: bool
    def __init__(self, run_id: _Optional[str] = ..., wait: _Optional[bool] = ..., without_files: _Optional[bool] = ..., whole: _Optional[bool] = ...) -> None: ...

class MeasureRequest(_message.Message):
    __slots__ = ("job_toml", "num_nodes", "join_s", "without_links", "fresh", "one_by_one")
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    JOIN_S_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_LINKS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    ONE_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    job_toml: str
    num_nodes: int
    join_s: float
    without_links: bool
    fresh: bool
    one_by_one: bool
    def __init__(self, job_toml: _Optional[str] = ..., num_nodes: _Optional[int] = ..., join_s: _Optional[float] = ..., without_links: _Optional[bool] = ..., fresh: _Optional[bool] = ..., one_by_one: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("run_id", "reason", "now")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    now: bool
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., now: _Optional[bool] = ...) -> None: ...

class CheckpointNoted(_message.Message):
    __slots__ = ("run_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("state", "job_toml", "profile_json", "plan_json", "metrics_json", "step_json", "report_json", "file", "failure", "done", "run_id", "checkpoint_json", "note", "kept", "operations_json", "resumed_json", "members_json", "kept_turn_json", "best_json", "activity_json")
    STATE_FIELD_NUMBER: _ClassVar[int]
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    PROFILE_JSON_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    STEP_JSON_FIELD_NUMBER: _ClassVar[int]
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_JSON_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    RESUMED_JSON_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_JSON_FIELD_NUMBER: _ClassVar[int]
    KEPT_TURN_JSON_FIELD_NUMBER: _ClassVar[int]
    BEST_JSON_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_JSON_FIELD_NUMBER: _ClassVar[int]
    state: str
    job_toml: str
    profile_json: str
    plan_json: str
    metrics_json: str
    step_json: str
    report_json: str
    file: FileChunk
    failure: RunFailure
    done: bool
    run_id: str
    checkpoint_json: str
    note: str
    kept: bool
    operations_json: str
    resumed_json: str
    members_json: str
    kept_turn_json: str
    best_json: str
    activity_json: str
    def __init__(self, state: _Optional[str] = ..., job_toml: _Optional[str] = ..., profile_json: _Optional[str] = ..., plan_json: _Optional[str] = ..., metrics_json: _Optional[str] = ..., step_json: _Optional[str] = ..., report_json: _Optional[str] = ..., file: _Optional[_Union[FileChunk, _Mapping]] = ..., failure: _Optional[_Union[RunFailure, _Mapping]] = ..., done: _Optional[bool] = ..., run_id: _Optional[str] = ..., checkpoint_json: _Optional[str] = ..., note: _Optional[str] = ..., kept: _Optional[bool] = ..., operations_json: _Optional[str] = ..., resumed_json: _Optional[str] = ..., members_json: _Optional[str] = ..., kept_turn_json: _Optional[str] = ..., best_json: _Optional[str] = ..., activity_json: _Optional[str] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("path", "chunk", "last", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    chunk: bytes
    last: bool
    sha256: str
    def __init__(self, path: _Optional[str] = ..., chunk: _Optional[bytes] = ..., last: _Optional[bool] = ..., sha256: _Optional[str] = ...) -> None: ...

class RunFailure(_message.Message):
    __slots__ = ("error", "message")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    error: str
    message: str
    def __init__(self, error: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("job_toml", "owner")
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    job_toml: str
    owner: str
    def __init__(self, job_toml: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class EvaluateInput(_message.Message):
    __slots__ = ("request", "file")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    request: EvaluateRequest
    file: FileChunk
    def __init__(self, request: _Optional[_Union[EvaluateRequest, _Mapping]] = ..., file: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "now_unix_s", "run", "nodes", "authorities_pem", "rotation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NOW_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_PEM_FIELD_NUMBER: _ClassVar[int]
    ROTATION_FIELD_NUMBER: _ClassVar[int]
    version: str
    now_unix_s: float
    run: RunStatus
    nodes: _containers.RepeatedCompositeFieldContainer[NodeEntry]
    authorities_pem: _containers.RepeatedScalarFieldContainer[bytes]
    rotation: RotationStatus
    def __init__(self, version: _Optional[str] = ..., now_unix_s: _Optional[float] = ..., run: _Optional[_Union[RunStatus, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[NodeEntry, _Mapping]]] = ..., authorities_pem: _Optional[_Iterable[bytes]] = ..., rotation: _Optional[_Union[RotationStatus, _Mapping]] = ...) -> None: ...

class RotationStatus(_message.Message):
    __slots__ = ("phase", "old_sha256", "new_sha256", "waiting", "ends_unix_s")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    OLD_SHA256_FIELD_NUMBER: _ClassVar[int]
    NEW_SHA256_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ENDS_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    phase: str
    old_sha256: str
    new_sha256: str
    waiting: int
    ends_unix_s: float
    def __init__(self, phase: _Optional[str] = ..., old_sha256: _Optional[str] = ..., new_sha256: _Optional[str] = ..., waiting: _Optional[int] = ..., ends_unix_s: _Optional[float] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run_id", "is_over", "phase", "phase_s", "run_s", "num_steps", "steps_done", "round", "initiator", "depth", "loss", "message", "trains", "helpers", "awaited", "awaited_why", "awaited_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    IS_OVER_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_S_FIELD_NUMBER: _ClassVar[int]
    RUN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INITIATOR_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRAINS_FIELD_NUMBER: _ClassVar[int]
    HELPERS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    AWAITED_WHY_FIELD_NUMBER: _ClassVar[int]
    AWAITED_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    is_over: bool
    phase: str
    phase_s: float
    run_s: float
    num_steps: int
    steps_done: int
    round: int
    initiator: str
    depth: int
    loss: float
    message: str
    trains: str
    helpers: _containers.RepeatedCompositeFieldContainer[HelperEntry]
    awaited: _containers.RepeatedScalarFieldContainer[str]
    awaited_why: str
    awaited_s: float
    def __init__(self, run_id: _Optional[str] = ..., is_over: _Optional[bool] = ..., phase: _Optional[str] = ..., phase_s: _Optional[float] = ..., run_s: _Optional[float] = ..., num_steps: _Optional[int] = ..., steps_done: _Optional[int] = ..., round: _Optional[int] = ..., initiator: _Optional[str] = ..., depth: _Optional[int] = ..., loss: _Optional[float] = ..., message: _Optional[str] = ..., trains: _Optional[str] = ..., helpers: _Optional[_Iterable[_Union[HelperEntry, _Mapping]]] = ..., awaited: _Optional[_Iterable[str]] = ..., awaited_why: _Optional[str] = ..., awaited_s: _Optional[float] = ...) -> None: ...

class HelperEntry(_message.Message):
    __slots__ = ("node", "host", "start", "stop")
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    node: str
    host: str
    start: int
    stop: int
    def __init__(self, node: _Optional[str] = ..., host: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("run_id", "job_toml", "measure", "checkpoint_run", "shards", "measure_s", "neighbours", "fresh", "frozen_dtype", "frozen_native", "nodes", "model_sha256", "rows_run")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_RUN_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    MEASURE_S_FIELD_NUMBER: _ClassVar[int]
    NEIGHBOURS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    FROZEN_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_NATIVE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MODEL_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROWS_RUN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    job_toml: str
    measure: bool
    checkpoint_run: str
    shards: _containers.RepeatedCompositeFieldContainer[ShardRef]
    measure_s: float
    neighbours: int
    fresh: bool
    frozen_dtype: str
    frozen_native: bool
    nodes: _containers.RepeatedScalarFieldContainer[str]
    model_sha256: str
    rows_run: str
    def __init__(self, run_id: _Optional[str] = ..., job_toml: _Optional[str] = ..., measure: _Optional[bool] = ..., checkpoint_run: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[ShardRef, _Mapping]]] = ..., measure_s: _Optional[float] = ..., neighbours: _Optional[int] = ..., fresh: _Optional[bool] = ..., frozen_dtype: _Optional[str] = ..., frozen_native: _Optional[bool] = ..., nodes: _Optional[_Iterable[str]] = ..., model_sha256: _Optional[str] = ..., rows_run: _Optional[str] = ...) -> None: ...

class ShardRef(_message.Message):
    __slots__ = ("step", "sha256")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    step: int
    sha256: str
    def __init__(self, step: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("step", "problem")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    step: int
    problem: str
    def __init__(self, step: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("facts_json", "shards", "saved", "lacks_model")
    FACTS_JSON_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    LACKS_MODEL_FIELD_NUMBER: _ClassVar[int]
    facts_json: str
    shards: _containers.RepeatedCompositeFieldContainer[ShardState]
    saved: _containers.RepeatedCompositeFieldContainer[SavedPart]
    lacks_model: bool
    def __init__(self, facts_json: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[ShardState, _Mapping]]] = ..., saved: _Optional[_Iterable[_Union[SavedPart, _Mapping]]] = ..., lacks_model: _Optional[bool] = ...) -> None: ...

class SavedPart(_message.Message):
    __slots__ = ("step", "attempt", "blocks", "has_head", "is_best")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HAS_HEAD_FIELD_NUMBER: _ClassVar[int]
    IS_BEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: str
    blocks: _containers.RepeatedScalarFieldContainer[int]
    has_head: bool
    is_best: bool
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[str] = ..., blocks: _Optional[_Iterable[int]] = ..., has_head: _Optional[bool] = ..., is_best: _Optional[bool] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("run_id", "placement_number", "plan_json", "job_toml", "addresses", "checkpoint_run", "start_holder", "shard", "checkpoint_plan", "saved", "block_bytes", "head_bytes")
    class AddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    JOB_TOML_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_RUN_FIELD_NUMBER: _ClassVar[int]
    START_HOLDER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PLAN_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    placement_number: int
    plan_json: str
    job_toml: str
    addresses: _containers.ScalarMap[str, str]
    checkpoint_run: str
    start_holder: str
    shard: ShardRef
    checkpoint_plan: str
    saved: SavedStart
    block_bytes: int
    head_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., placement_number: _Optional[int] = ..., plan_json: _Optional[str] = ..., job_toml: _Optional[str] = ..., addresses: _Optional[_Mapping[str, str]] = ..., checkpoint_run: _Optional[str] = ..., start_holder: _Optional[str] = ..., shard: _Optional[_Union[ShardRef, _Mapping]] = ..., checkpoint_plan: _Optional[str] = ..., saved: _Optional[_Union[SavedStart, _Mapping]] = ..., block_bytes: _Optional[int] = ..., head_bytes: _Optional[int] = ...) -> None: ...

class SavedStart(_message.Message):
    __slots__ = ("step", "attempt", "sources", "head_sha256", "head_from", "digests")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    HEAD_SHA256_FIELD_NUMBER: _ClassVar[int]
    HEAD_FROM_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: str
    sources: _containers.RepeatedCompositeFieldContainer[SnapshotSource]
    head_sha256: str
    head_from: str
    digests: _containers.RepeatedCompositeFieldContainer[CopyDigest]
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[SnapshotSource, _Mapping]]] = ..., head_sha256: _Optional[str] = ..., head_from: _Optional[str] = ..., digests: _Optional[_Iterable[_Union[CopyDigest, _Mapping]]] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("hosted_bytes",)
    HOSTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    hosted_bytes: int
    def __init__(self, hosted_bytes: _Optional[int] = ...) -> None: ...

class FetchAheadReply(_message.Message):
    __slots__ = ("fetched_bytes",)
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    fetched_bytes: int
    def __init__(self, fetched_bytes: _Optional[int] = ...) -> None: ...

class RestRequest(_message.Message):
    __slots__ = ("run_id", "placement_number", "halts")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    HALTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    placement_number: int
    halts: bool
    def __init__(self, run_id: _Optional[str] = ..., placement_number: _Optional[int] = ..., halts: _Optional[bool] = ...) -> None: ...

class RestReply(_message.Message):
    __slots__ = ("totals_json",)
    TOTALS_JSON_FIELD_NUMBER: _ClassVar[int]
    totals_json: str
    def __init__(self, totals_json: _Optional[str] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("prepare", "step", "holder", "first_turn", "first_seq", "from_placement_number", "sources", "recovers", "repeats", "head_from", "digests", "others", "other_head", "takes_holder")
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TURN_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    FROM_PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    RECOVERS_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FROM_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    OTHER_HEAD_FIELD_NUMBER: _ClassVar[int]
    TAKES_HOLDER_FIELD_NUMBER: _ClassVar[int]
    prepare: PrepareRequest
    step: int
    holder: str
    first_turn: int
    first_seq: int
    from_placement_number: int
    sources: _containers.RepeatedCompositeFieldContainer[SnapshotSource]
    recovers: bool
    repeats: _containers.RepeatedScalarFieldContainer[str]
    head_from: str
    digests: _containers.RepeatedCompositeFieldContainer[CopyDigest]
    others: _containers.RepeatedCompositeFieldContainer[SnapshotSource]
    other_head: str
    takes_holder: bool
    def __init__(self, prepare: _Optional[_Union[PrepareRequest, _Mapping]] = ..., step: _Optional[int] = ..., holder: _Optional[str] = ..., first_turn: _Optional[int] = ..., first_seq: _Optional[int] = ..., from_placement_number: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SnapshotSource, _Mapping]]] = ..., recovers: _Optional[bool] = ..., repeats: _Optional[_Iterable[str]] = ..., head_from: _Optional[str] = ..., digests: _Optional[_Iterable[_Union[CopyDigest, _Mapping]]] = ..., others: _Optional[_Iterable[_Union[SnapshotSource, _Mapping]]] = ..., other_head: _Optional[str] = ..., takes_holder: _Optional[bool] = ...) -> None: ...

class SnapshotSource(_message.Message):
    __slots__ = ("node", "start", "stop", "sha256")
    NODE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    node: str
    start: int
    stop: int
    sha256: str
    def __init__(self, node: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class MoveReply(_message.Message):
    __slots__ = ("hosted_bytes", "fetched_bytes", "problem", "holder")
    HOSTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    hosted_bytes: int
    fetched_bytes: int
    problem: str
    holder: str
    def __init__(self, hosted_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., problem: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("run_id", "placement_number", "start", "stop", "is_kept", "step", "is_saved", "attempt", "sha256", "is_head", "node", "is_audit", "audited", "cell")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    IS_SAVED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    IS_HEAD_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    IS_AUDIT_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    placement_number: int
    start: int
    stop: int
    is_kept: bool
    step: int
    is_saved: bool
    attempt: str
    sha256: str
    is_head: bool
    node: str
    is_audit: bool
    audited: AuditedTensor
    cell: AuditedCell
    def __init__(self, run_id: _Optional[str] = ..., placement_number: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., is_kept: _Optional[bool] = ..., step: _Optional[int] = ..., is_saved: _Optional[bool] = ..., attempt: _Optional[str] = ..., sha256: _Optional[str] = ..., is_head: _Optional[bool] = ..., node: _Optional[str] = ..., is_audit: _Optional[bool] = ..., audited: _Optional[_Union[AuditedTensor, _Mapping]] = ..., cell: _Optional[_Union[AuditedCell, _Mapping]] = ...) -> None: ...

class AuditedCell(_message.Message):
    __slots__ = ("turn", "seq", "micro", "before", "last", "is_fit", "block")
    TURN_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    MICRO_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    IS_FIT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    turn: int
    seq: int
    micro: int
    before: int
    last: int
    is_fit: bool
    block: int
    def __init__(self, turn: _Optional[int] = ..., seq: _Optional[int] = ..., micro: _Optional[int] = ..., before: _Optional[int] = ..., last: _Optional[int] = ..., is_fit: _Optional[bool] = ..., block: _Optional[int] = ...) -> None: ...

class RepeatRequest(_message.Message):
    __slots__ = ("run_id", "placement_number", "node", "cell", "given", "tickets")
    class GivenEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class TicketsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CELL_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    placement_number: int
    node: str
    cell: AuditedCell
    given: _containers.ScalarMap[str, str]
    tickets: _containers.ScalarMap[str, str]
    def __init__(self, run_id: _Optional[str] = ..., placement_number: _Optional[int] = ..., node: _Optional[str] = ..., cell: _Optional[_Union[AuditedCell, _Mapping]] = ..., given: _Optional[_Mapping[str, str]] = ..., tickets: _Optional[_Mapping[str, str]] = ...) -> None: ...

class RepeatReply(_message.Message):
    __slots__ = ("results_json", "node", "problem", "is_lost")
    RESULTS_JSON_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    results_json: str
    node: str
    problem: str
    is_lost: bool
    def __init__(self, results_json: _Optional[str] = ..., node: _Optional[str] = ..., problem: _Optional[str] = ..., is_lost: _Optional[bool] = ...) -> None: ...

class KeepChunk(_message.Message):
    __slots__ = ("run_id", "step", "node", "file", "is_head", "placement_number", "is_saved")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    IS_HEAD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_SAVED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    node: str
    file: FileChunk
    is_head: bool
    placement_number: int
    is_saved: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., node: _Optional[str] = ..., file: _Optional[_Union[FileChunk, _Mapping]] = ..., is_head: _Optional[bool] = ..., placement_number: _Optional[int] = ..., is_saved: _Optional[bool] = ...) -> None: ...

class LoadChunk(_message.Message):
    __slots__ = ("run_id", "file")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    file: FileChunk
    def __init__(self, run_id: _Optional[str] = ..., file: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class TurnMessage(_message.Message):
    __slots__ = ("index", "kind", "owner", "round", "first_seq", "num_items", "first_step", "first_batch", "unfreeze_at", "operations", "enters", "keeps")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    FIRST_BATCH_FIELD_NUMBER: _ClassVar[int]
    UNFREEZE_AT_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    ENTERS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    index: int
    kind: str
    owner: str
    round: int
    first_seq: int
    num_items: int
    first_step: int
    first_batch: int
    unfreeze_at: _containers.RepeatedScalarFieldContainer[int]
    operations: str
    enters: _containers.RepeatedScalarFieldContainer[int]
    keeps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., kind: _Optional[str] = ..., owner: _Optional[str] = ..., round: _Optional[int] = ..., first_seq: _Optional[int] = ..., num_items: _Optional[int] = ..., first_step: _Optional[int] = ..., first_batch: _Optional[int] = ..., unfreeze_at: _Optional[_Iterable[int]] = ..., operations: _Optional[str] = ..., enters: _Optional[_Iterable[int]] = ..., keeps: _Optional[_Iterable[int]] = ...) -> None: ...

class TableMessage(_message.Message):
    __slots__ = ("digest", "table_json")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TABLE_JSON_FIELD_NUMBER: _ClassVar[int]
    digest: str
    table_json: bytes
    def __init__(self, digest: _Optional[str] = ..., table_json: _Optional[bytes] = ...) -> None: ...

class GrantRequest(_message.Message):
    __slots__ = ("run_id", "placement_number", "turns", "keep_from_step", "tables", "keep")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    placement_number: int
    turns: _containers.RepeatedCompositeFieldContainer[TurnMessage]
    keep_from_step: int
    tables: _containers.RepeatedCompositeFieldContainer[TableMessage]
    keep: _containers.RepeatedCompositeFieldContainer[AuditedTensor]
    def __init__(self, run_id: _Optional[str] = ..., placement_number: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[TurnMessage, _Mapping]]] = ..., keep_from_step: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[TableMessage, _Mapping]]] = ..., keep: _Optional[_Iterable[_Union[AuditedTensor, _Mapping]]] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("run_id", "with_head", "with_private", "goes_on", "best_step", "needed_steps")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_HEAD_FIELD_NUMBER: _ClassVar[int]
    WITH_PRIVATE_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    BEST_STEP_FIELD_NUMBER: _ClassVar[int]
    NEEDED_STEPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    with_head: bool
    with_private: bool
    goes_on: bool
    best_step: int
    needed_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., with_head: _Optional[bool] = ..., with_private: _Optional[bool] = ..., goes_on: _Optional[bool] = ..., best_step: _Optional[int] = ..., needed_steps: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run_id", "reason", "is_finished")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    reason: str
    is_finished: bool
    def __init__(self, run_id: _Optional[str] = ..., reason: _Optional[str] = ..., is_finished: _Optional[bool] = ...) -> None: ...

class MeasureLinkRequest(_message.Message):
    __slots__ = ("target", "address", "message_bytes", "brief", "computing_s")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_S_FIELD_NUMBER: _ClassVar[int]
    target: str
    address: str
    message_bytes: int
    brief: bool
    computing_s: float
    def __init__(self, target: _Optional[str] = ..., address: _Optional[str] = ..., message_bytes: _Optional[int] = ..., brief: _Optional[bool] = ..., computing_s: _Optional[float] = ...) -> None: ...

class MeasureLinkReply(_message.Message):
    __slots__ = ("rate_bytes_per_s", "rate_low_bytes_per_s", "rate_high_bytes_per_s", "latency_s", "samples", "sent_bytes", "send_cpu_s_per_byte", "receive_cpu_s_per_byte", "busy_source_s", "busy_target_s", "computing_lost_s_per_byte")
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RATE_LOW_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RATE_HIGH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEND_CPU_S_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_CPU_S_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    BUSY_SOURCE_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_LOST_S_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    rate_bytes_per_s: float
    rate_low_bytes_per_s: float
    rate_high_bytes_per_s: float
    latency_s: float
    samples: int
    sent_bytes: int
    send_cpu_s_per_byte: float
    receive_cpu_s_per_byte: float
    busy_source_s: float
    busy_target_s: float
    computing_lost_s_per_byte: float
    def __init__(self, rate_bytes_per_s: _Optional[float] = ..., rate_low_bytes_per_s: _Optional[float] = ..., rate_high_bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ..., samples: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., send_cpu_s_per_byte: _Optional[float] = ..., receive_cpu_s_per_byte: _Optional[float] = ..., busy_source_s: _Optional[float] = ..., busy_target_s: _Optional[float] = ..., computing_lost_s_per_byte: _Optional[float] = ...) -> None: ...

class ProbeMessage(_message.Message):
    __slots__ = ("wants_arrival", "payload")
    WANTS_ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    wants_arrival: bool
    payload: bytes
    def __init__(self, wants_arrival: _Optional[bool] = ..., payload: _Optional[bytes] = ...) -> None: ...

class ProbeArrival(_message.Message):
    __slots__ = ("at_s", "cpu_s")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    cpu_s: float
    def __init__(self, at_s: _Optional[float] = ..., cpu_s: _Optional[float] = ...) -> None: ...
