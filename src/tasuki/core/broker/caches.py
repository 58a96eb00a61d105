"""Caches: files that many jobs share, kept by the workers. Pure.

Theory of operation. The store knows the files of each cache by name, hash and size, and keeps their blobs from collection; a job
that names one of them is stored with its hash and size, so that nothing it needs can change or vanish afterwards. Workers fetch
the blobs: ahead of time when a client puts files, and when a job needs a file that its worker lacks.

A client that puts files asks until all workers are done: each time the files are stored (again without effect), the workers here
are asked to have them, and the client is told how each of them stands after at most `wait_s`. So the server remembers only the
questions under way, each with a deadline, and whatever dies, the client asks again. Workers of other servers are asked through
these servers, whose addresses the client gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from tasuki.core import protocol
from tasuki.core.access import Identity
from tasuki.core.broker import events
from tasuki.core.broker.authentication import usable_by
from tasuki.core.broker.state import BrokerState, ClientSession, PendingCachePut, WorkerSession
from tasuki.core.broker.turn_builder import TurnEffects
from tasuki.core.job import InputFile, JobSpec, check_file_name, check_name, check_sha256, check_together, mark
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import CacheAck, CachePut, CacheStatus, WorkerCache
from tasuki.core.store_messages import CachedFile, CacheOrder, CacheStored, MissingBlobs, Submission
from tasuki.core.subject import check_job_pattern, intersects
from tasuki.errors import CacheConflict, InvalidInput, NotFound, Overloaded

PUTS_PER_CLIENT = 8  # questions under way of one connection
ANSWER_WITHIN_S = 3.0  # beyond the wait; then the client is answered without the worker
MESSAGE_MAX_CHARS = 1000
MISSING_MAX = 500  # blobs or workers that one refusal names: an Error has a header of 64 KiB
NO_BLOB = "0" * 64  # stands for a file that no cache has: the store knows no such blob, and refuses the job


# ---------------------------------------------------------------------------------------------------- put


def put(state: BrokerState, client: ClientSession, identity: Identity, message: CachePut) -> list[events.Command]:
    """Store the files of a cache, then ask the workers to fetch them."""
    check_name(message.cache_id, "cache_id")
    message = replace(message, target=check_job_pattern(message.target))
    identity.check_put(message.target)
    if not message.entries:
        raise InvalidInput(f"cache {message.cache_id!r}: there is no file to put")
    if not 0.0 <= message.wait_s <= protocol.LOG_WAIT_MAX_S:
        raise InvalidInput(f"wait_s must be 0 to {protocol.LOG_WAIT_MAX_S:g} seconds, got {message.wait_s}")
    for entry in message.entries:
        check_file_name(entry.name)
        check_sha256(entry.sha256)
        if not 0 <= entry.size_bytes <= protocol.NUMBER_MAX:
            raise InvalidInput(f"file {entry.name!r} cannot have {entry.size_bytes} bytes")
    check_together(entry.name for entry in message.entries)
    if client.cache_puts >= PUTS_PER_CLIENT:
        raise Overloaded(f"{client.cache_puts} puts of caches are open on this connection; wait for their answers")
    order = CacheOrder(message.cache_id, message.target, identity.name, tuple(message.entries))
    failed = partial(state.tell_failure, client.conn, message.msg_id)
    size_bytes = sum(len(entry.name) + 128 for entry in message.entries)
    state.builder.ask("put_cache", [order], partial(_stored, state, client, message), failed, client.owner, size_bytes)
    return []


def _stored(
    state: BrokerState,
    client: ClientSession,
    message: CachePut,
    answers: Sequence[CacheStored | CacheConflict | MissingBlobs],
    effects: TurnEffects,
) -> None:
    [answer] = answers
    if client.conn not in state.sessions:
        return
    if isinstance(answer, CacheConflict):
        refused = [worker.worker_id for worker in state.workers.values() if _is_meant(worker.patterns, message.target)]
        conflict = CacheConflict(answer.message, **answer.details(), workers=refused[:MISSING_MAX])
        state.answer(client.conn, message.msg_id, conflict, effects)
    elif isinstance(answer, MissingBlobs):
        unfit = f"cache {message.cache_id!r} needs {len(answer.sha256s)} blobs that are not here; upload them first"
        state.answer(client.conn, message.msg_id, NotFound(unfit, blobs=list(answer.sha256s[:MISSING_MAX])), effects)
    else:
        _ask_workers(state, client, message, effects)


def _ask_workers(state: BrokerState, client: ClientSession, message: CachePut, effects: TurnEffects) -> None:
    here = [worker for worker in state.workers.values() if _is_meant(worker.patterns, message.target)]
    elsewhere, away = _servers_with(state, client, message.target)
    known = {worker.worker_id: WorkerCache(worker.worker_id, CacheStatus.AWAY, "it did not answer in time") for worker in here}
    known |= {one.worker_id: one for one in away}
    number = state.last_question = state.last_question + 1
    pending = PendingCachePut(client.conn, message, known, elsewhere, effects.now.monotonic + message.wait_s + ANSWER_WITHIN_S)
    for worker in here:
        if worker.caches:
            pending.waiting[worker.conn] = worker.worker_id
            effects.send(worker.conn, replace(message, msg_id=number))
        else:
            reason = "this worker keeps no caches; upgrade it"
            known[worker.worker_id] = WorkerCache(worker.worker_id, CacheStatus.FAILED, reason)
    if pending.waiting and message.wait_s:
        state.cache_puts[number] = pending
        client.cache_puts += 1
    else:
        effects.send(client.conn, _answer(pending))


def _is_meant(patterns: Sequence[str], target: str) -> bool:
    return any(intersects(pattern, target) for pattern in patterns)


def _servers_with(state: BrokerState, client: ClientSession, target: str) -> tuple[tuple[str, ...], list[WorkerCache]]:
    """Return an address of each other server that has such workers, and these workers: the client hears of them there, unless
    that server has just died or cannot be reached from where the client is."""
    addresses: dict[str, None] = {}
    away = []
    for server_id, worker in state.cluster.workers():
        if worker.worker_id not in state.workers and _is_meant(worker.patterns, target):
            # A client over HTTP, perhaps behind a load balancer, or on a unix socket follows no addresses.
            follows = client.peer.transport == "tcp"
            usable = usable_by(client.peer, state.cluster.servers[server_id].addresses) if follows else ()
            if usable:
                addresses[usable[0]] = None
            reason = (
                f"it is connected to server {server_id}, which did not answer"
                if usable
                else f"it is connected to server {server_id}, and only that one can ask it"
            )
            away.append(WorkerCache(worker.worker_id, CacheStatus.AWAY, reason))
    return tuple(addresses), away


def acknowledged(state: BrokerState, worker: WorkerSession, ack: CacheAck) -> list[events.Command]:
    """Take a worker's answer. An answer to no question of ours is dropped."""
    pending = state.cache_puts.get(ack.corr_id)
    if pending is None or pending.waiting.pop(worker.conn, None) is None or len(ack.workers) != 1:
        return []
    [told] = ack.workers
    status = CacheStatus.FAILED if told.status is CacheStatus.AWAY else told.status
    message, done_bytes = told.message[:MESSAGE_MAX_CHARS], max(0, min(told.done_bytes, protocol.NUMBER_MAX))
    pending.workers[worker.worker_id] = WorkerCache(worker.worker_id, status, message, done_bytes)
    return [] if pending.waiting else _finish(state, ack.corr_id)


def ticked(state: BrokerState, now: Now) -> list[events.Command]:
    """Answer clients whose workers are late or have left."""
    late = []
    for number, pending in state.cache_puts.items():
        gone = [conn for conn in pending.waiting if conn not in state.sessions]
        for conn in gone:
            del pending.waiting[conn]
        if pending.deadline <= now.monotonic or not pending.waiting or pending.conn not in state.sessions:
            late.append(number)
    return [command for number in late for command in _finish(state, number)]


def _finish(state: BrokerState, number: int) -> list[events.Command]:
    pending = state.cache_puts.pop(number)
    client = state.sessions.get(pending.conn)
    if not isinstance(client, ClientSession):
        return []
    client.cache_puts -= 1
    return [Send(pending.conn, _answer(pending))]


def _answer(pending: PendingCachePut) -> CacheAck:
    return CacheAck(pending.message.msg_id, pending.message.cache_id, list(pending.workers.values()), pending.elsewhere)


# ---------------------------------------------------------------------------------------------------- remove


def remove(state: BrokerState, client: ClientSession, identity: Identity, request: protocol.Request) -> list[events.Command]:
    """Remove a cache that has this target, and tell the workers here. Jobs that were accepted keep what they need."""
    cache_id = check_name(str(request.params.get("cache_id", "")), "cache_id")
    target = check_job_pattern(str(request.params.get("target", "")))
    identity.check_put(target)

    def removed(counts: Sequence[int], effects: TurnEffects) -> None:
        gone = NotFound(f"there is no cache {cache_id!r} for {target!r}; see: tasuki cache list")
        state.answer(client.conn, request.msg_id, {"cache_id": cache_id, "files": counts[0]} if counts[0] else gone, effects)
        for worker in state.workers.values():
            if counts[0] and worker.caches and _is_meant(worker.patterns, target):
                state.last_question += 1
                effects.send(worker.conn, CachePut(state.last_question, cache_id, target, []))

    failed = partial(state.tell_failure, client.conn, request.msg_id)
    state.builder.ask("remove_cache", [(cache_id, target)], removed, failed)
    return []


# ---------------------------------------------------------------------------------------------------- jobs that use them


def resolve(
    state: BrokerState,
    client: ClientSession,
    identity: Identity,
    msg_id: int,
    submissions: list[Submission],
    then: Callable[[list[Submission]], None],
) -> None:
    """Call `then` with the submissions in which files of caches have the hash and size that they have now.

    A file that the submitter cannot use gets those of no blob: a job that is there already is found by its id all the same, and
    a new one is refused.
    """
    wanted = list(dict.fromkeys(key for one in submissions for file in one.spec.files if (key := file.cached_as) is not None))

    def found(files: Sequence[CachedFile | None], effects: TurnEffects) -> None:
        usable = {
            key: file
            for key, file in zip(wanted, files, strict=True)
            if file is not None and identity.may_read_cache(file.owner, file.target)
        }
        then([replace(one, spec=_resolved(state, identity, one.spec, usable)) for one in submissions])

    state.builder.ask("cached_files", wanted, found, partial(state.tell_failure, client.conn, msg_id), client.owner)


def _resolved(state: BrokerState, identity: Identity, spec: JobSpec, usable: Mapping[tuple[str, str], CachedFile]) -> JobSpec:
    def with_hash(file: InputFile) -> InputFile:
        if (key := file.cached_as) is None:
            return file
        there = usable.get(key)
        return replace(file, sha256=there.sha256 if there else NO_BLOB, size_bytes=there.size_bytes if there else 0)

    resolved = replace(spec, files=tuple(with_hash(file) for file in spec.files))
    return mark(resolved, identity.name, state.config.key) if spec.mac else resolved


def not_cached(job_id: str, spec: JobSpec) -> NotFound:
    """Return the refusal of a job that names files which no cache has, or which are not for its submitter."""
    named = ", ".join(":".join(key) for file in spec.files if file.sha256 == NO_BLOB and (key := file.cached_as) is not None)
    absent = f"job {job_id!r} needs {named[:400]}, which no cache has, or not for you"
    return NotFound(f"{absent}; put it there first (tasuki cache put), or see what there is: tasuki cache list")
