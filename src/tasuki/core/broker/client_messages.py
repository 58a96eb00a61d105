"""What clients ask of a broker: submits, questions, orders. Part of the broker; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tasuki.core.access import TOKEN_PREFIXES, Identity, PeerKind
from tasuki.core.broker import enrolment
from tasuki.core.broker.events import Detach, Query
from tasuki.core.broker.log_reads import question_of
from tasuki.core.broker.sessions import ClientSession
from tasuki.core.broker.turn_builder import BlobRoute, SubmitRoute, TokenRoute
from tasuki.core.ids import check_name
from tasuki.core.job import body_hash, check_spec, is_sha256
from tasuki.core.machine import Send
from tasuki.core.protocol import BATCH_MAX, Acceptance, BlobPut, Reply, Request, SubmitJobs
from tasuki.core.report_limits import NUMBER_MAX
from tasuki.core.store_messages import BlobClaim, Submission, TokenRow
from tasuki.errors import DiskFull, InvalidInput, NotFound, TasukiError, Unavailable, discreet

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import Command

SPECS_MAX = BATCH_MAX  # jobs of one frame: the answers must fit a frame too, and those that exist are read whole
READ_VERBS = frozenset({"get", "find", "counts", "explain", "token.audit"})
TOKEN_VERBS = frozenset({"token.create", "token.list", "token.revoke"})


def submit(broker: Broker, client: ClientSession, identity: Identity, message: SubmitJobs) -> list[Command]:
    """Check each job by itself and add it to the draft; what cannot be accepted is named by its index."""
    if broker.disk_problem:
        full = DiskFull(f"no job can be accepted: {broker.disk_problem}")
        raise full if identity.admin else discreet(full)
    if message.on_failed not in ("return", "rerun"):
        raise InvalidInput(f'on_failed must be "return" or "rerun", got {message.on_failed[:40]!r}')
    if len(message.specs) > SPECS_MAX:
        raise InvalidInput(f"{len(message.specs)} jobs in one frame are too many, the limit is {SPECS_MAX}; send several frames")
    rerun = message.on_failed == "rerun"
    into = broker.draft.rerun if rerun else broker.draft.submit
    start = len(into)
    submitter = identity.name
    subjects = broker.draft.subjects
    rejected: list[Acceptance] = []
    indexes: list[int] | None = None
    for index, spec in enumerate(message.specs):
        try:
            check_spec(spec)
            if identity.scope:
                identity.check_submit(spec.subject)
        except TasukiError as error:
            if indexes is None:
                indexes = list(range(index))
            rejected.append(Acceptance(index, spec.job_id[:128], "", error.code, error.message, error.details()))
            continue
        if indexes is not None:
            indexes.append(index)
        subjects[spec.subject] = None
        broker.draft.size_bytes += len(spec.payload)
        into.append(Submission(spec, submitter, body_hash(spec)))
    count = len(message.specs)
    route = SubmitRoute(client.conn, message.msg_id, start, len(into), message.watch, rerun, count, rejected, indexes)
    broker.draft.submit_routes.append(route)
    return []


def put_blob(broker: Broker, conn: int, put: BlobPut) -> list[Command]:
    """A peer brings a blob: the store says where its bytes belong, and keeps them from being collected."""
    if not is_sha256(put.sha256):
        raise InvalidInput(f"not a sha256: {put.sha256[:80]!r}; it must be 64 lower-case hex digits")
    if not 0 <= put.size_bytes <= NUMBER_MAX:
        raise InvalidInput(f"a blob cannot have {put.size_bytes} bytes")
    if broker.blob_problem:
        raise DiskFull(f"no blob can be taken: {broker.blob_problem}; wait, shorten the retention, or raise --blob-budget")
    broker.draft.place_routes.append(BlobRoute(conn, put))
    broker.draft.place_blobs.append(BlobClaim(put.sha256, put.size_bytes))
    return []


def request(broker: Broker, client: ClientSession, identity: Identity, request: Request) -> list[Command]:
    """A question or an order by name."""
    verb, params = request.verb, request.params
    if verb in READ_VERBS:
        if verb == "explain":
            workers, trouble = broker.describe_workers(), broker.disk_problem or broker.store_problem
            if trouble and not identity.admin:
                trouble = discreet(DiskFull("") if broker.disk_problem else Unavailable("")).message
            return [Query(client.conn, request.msg_id, verb, params, identity, workers, trouble=trouble)]
        return [Query(client.conn, request.msg_id, verb, params, identity, [])]
    if verb == "logs":
        question = question_of(params)
        return [Query(client.conn, request.msg_id, verb, {"job_id": question.job_id}, identity, [], question)]
    if verb in ("watch", "requeue"):
        job_ids = params.get("job_ids")
        if not isinstance(job_ids, list) or not all(isinstance(job_id, str) for job_id in job_ids):
            raise InvalidInput(f"{verb} needs job_ids, a list of texts")
        return broker.check(client.conn, request.msg_id, job_ids, verb, str(params.get("reason", "")))
    if verb == "workers":
        identity.check_admin("the list of workers")
        return [Send(client.conn, Reply(request.msg_id, broker.describe_workers()))]
    if verb in ("detach", "attach"):
        identity.check_admin(verb)
        worker_id = check_name(str(params.get("worker_id", "")), "worker_id")
        reason = str(params.get("reason", ""))[:1000]
        return [Detach(client.conn, request.msg_id, worker_id, verb == "detach", identity.name, reason)]
    if verb == "servers":
        identity.check_admin("the list of servers")
        return [Send(client.conn, Reply(request.msg_id, broker.describe_servers()))]
    if verb in TOKEN_VERBS:
        identity.check_admin(verb)
        return _token_order(broker, client, request, identity)
    if verb == enrolment.REGISTER:
        return enrolment.register(broker, client.conn, request, identity)
    if verb == enrolment.REVOKE:
        return enrolment.revoke(broker, client.conn, request, identity)
    verbs = sorted(READ_VERBS | TOKEN_VERBS | {"logs", "watch", "requeue", "workers", "servers", "detach", "attach"})
    raise NotFound(f"there is no request {verb[:40]!r}; there are {', '.join(verbs)}")


def _token_order(broker: Broker, client: ClientSession, request: Request, identity: Identity) -> list[Command]:
    draft, index, body = broker.draft, 0, None
    if request.verb == "token.create":
        try:
            row = msgspec.convert(request.params, TokenRow)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"token.create: {error}") from None
        if row.kind not in TOKEN_PREFIXES:
            raise InvalidInput(f"a token's kind must be {', '.join(TOKEN_PREFIXES)}, got {row.kind[:40]!r}")
        if row.kind == PeerKind.ENROL:
            enrolment.check_enrol_row(row)
        check_name(row.token_id, "token_id")
        if row.worker_id:
            check_name(row.worker_id, "worker_id")
        if len(row.sha256) != 64 or not set(row.sha256) <= set("0123456789abcdef"):
            raise InvalidInput("token.create: sha256 must be the 64 lower-case hex digits of the secret's hash, never the secret")
        for pattern in row.scope:
            identity.check_patterns((pattern,))
        index = len(draft.add_token)
        draft.add_token.append(msgspec.structs.replace(row, created_by=identity.name, revoked_at=None, revoked_by=""))
        body = {"token_id": row.token_id}
    elif request.verb == "token.revoke":
        index = len(draft.revoke_token)
        token_id = str(request.params.get("token_id", ""))
        draft.revoke_token.append((token_id, identity.name))
        body = {"token_id": token_id}
    else:
        draft.list_tokens = True
    draft.token_routes.append(TokenRoute(client.conn, request.msg_id, request.verb, index, body))
    return []
