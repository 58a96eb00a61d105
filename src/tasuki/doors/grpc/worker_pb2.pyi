from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_SUBLEADER: _ClassVar[Role]
    ROLE_LEADER: _ClassVar[Role]

class OrderStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_STATUS_UNSPECIFIED: _ClassVar[OrderStatus]
    ORDER_STATUS_ACCEPTED: _ClassVar[OrderStatus]
    ORDER_STATUS_ALREADY: _ClassVar[OrderStatus]
    ORDER_STATUS_NOT_ASSIGNED: _ClassVar[OrderStatus]
    ORDER_STATUS_NOT_DUE: _ClassVar[OrderStatus]
    ORDER_STATUS_NOT_RUNNING: _ClassVar[OrderStatus]
    ORDER_STATUS_STALE_EPOCH: _ClassVar[OrderStatus]
    ORDER_STATUS_DETACHED: _ClassVar[OrderStatus]
    ORDER_STATUS_DRAINING: _ClassVar[OrderStatus]

class Continuation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTINUATION_UNSPECIFIED: _ClassVar[Continuation]
    CONTINUATION_CONTINUE: _ClassVar[Continuation]
    CONTINUATION_STOP: _ClassVar[Continuation]
    CONTINUATION_ASK_ELSEWHERE: _ClassVar[Continuation]
ROLE_UNSPECIFIED: Role
ROLE_WORKER: Role
ROLE_SUBLEADER: Role
ROLE_LEADER: Role
ORDER_STATUS_UNSPECIFIED: OrderStatus
ORDER_STATUS_ACCEPTED: OrderStatus
ORDER_STATUS_ALREADY: OrderStatus
ORDER_STATUS_NOT_ASSIGNED: OrderStatus
ORDER_STATUS_NOT_DUE: OrderStatus
ORDER_STATUS_NOT_RUNNING: OrderStatus
ORDER_STATUS_STALE_EPOCH: OrderStatus
ORDER_STATUS_DETACHED: OrderStatus
ORDER_STATUS_DRAINING: OrderStatus
CONTINUATION_UNSPECIFIED: Continuation
CONTINUATION_CONTINUE: Continuation
CONTINUATION_STOP: Continuation
CONTINUATION_ASK_ELSEWHERE: Continuation

class Caller(_message.Message):
    __slots__ = ("node_id", "worker_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    worker_id: str
    def __init__(self, node_id: _Optional[str] = ..., worker_id: _Optional[str] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("worker_id", "node_id", "incarnation", "role", "epoch_seen")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    node_id: str
    incarnation: str
    role: Role
    epoch_seen: int
    def __init__(self, worker_id: _Optional[str] = ..., node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., epoch_seen: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("caller",)
    CALLER_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("who", "load", "max_jobs", "current_job_run_ids", "detached", "draining", "last_seen_ts", "version", "schema_version", "refused", "led_ago_s")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WHO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_JOB_RUN_IDS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_TS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    who: PingResponse
    load: int
    max_jobs: int
    current_job_run_ids: _containers.RepeatedScalarFieldContainer[str]
    detached: bool
    draining: bool
    last_seen_ts: float
    version: str
    schema_version: int
    refused: _containers.ScalarMap[str, int]
    led_ago_s: float
    def __init__(self, who: _Optional[_Union[PingResponse, _Mapping]] = ..., load: _Optional[int] = ..., max_jobs: _Optional[int] = ..., current_job_run_ids: _Optional[_Iterable[str]] = ..., detached: bool = ..., draining: bool = ..., last_seen_ts: _Optional[float] = ..., version: _Optional[str] = ..., schema_version: _Optional[int] = ..., refused: _Optional[_Mapping[str, int]] = ..., led_ago_s: _Optional[float] = ...) -> None: ...

class JobRunRef(_message.Message):
    __slots__ = ("job_run_id", "attempt")
    JOB_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job_run_id: str
    attempt: int
    def __init__(self, job_run_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class StartJobRequest(_message.Message):
    __slots__ = ("caller", "leader_epoch", "worker_id", "runs")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    leader_epoch: int
    worker_id: str
    runs: _containers.RepeatedCompositeFieldContainer[JobRunRef]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., leader_epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., runs: _Optional[_Iterable[_Union[JobRunRef, _Mapping]]] = ...) -> None: ...

class StartJobResponse(_message.Message):
    __slots__ = ("statuses", "epoch_seen")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[OrderStatus]
    epoch_seen: int
    def __init__(self, statuses: _Optional[_Iterable[_Union[OrderStatus, str]]] = ..., epoch_seen: _Optional[int] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("caller", "leader_epoch", "worker_id", "run", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    leader_epoch: int
    worker_id: str
    run: JobRunRef
    reason: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., leader_epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., run: _Optional[_Union[JobRunRef, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class CancelJobResponse(_message.Message):
    __slots__ = ("status", "epoch_seen")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    status: OrderStatus
    epoch_seen: int
    def __init__(self, status: _Optional[_Union[OrderStatus, str]] = ..., epoch_seen: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("caller", "leader_epoch", "worker_id", "on", "reason")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    LEADER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    leader_epoch: int
    worker_id: str
    on: bool
    reason: str
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., leader_epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., on: bool = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("status", "epoch_seen")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    status: OrderStatus
    epoch_seen: int
    def __init__(self, status: _Optional[_Union[OrderStatus, str]] = ..., epoch_seen: _Optional[int] = ...) -> None: ...

class ConfirmContinuationRequest(_message.Message):
    __slots__ = ("caller", "run", "renewed_ago_s")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    RENEWED_AGO_S_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    run: JobRunRef
    renewed_ago_s: float
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., run: _Optional[_Union[JobRunRef, _Mapping]] = ..., renewed_ago_s: _Optional[float] = ...) -> None: ...

class ConfirmContinuationResponse(_message.Message):
    __slots__ = ("continuation", "addresses", "epoch_seen")
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    continuation: Continuation
    addresses: _containers.RepeatedScalarFieldContainer[str]
    epoch_seen: int
    def __init__(self, continuation: _Optional[_Union[Continuation, str]] = ..., addresses: _Optional[_Iterable[str]] = ..., epoch_seen: _Optional[int] = ...) -> None: ...
