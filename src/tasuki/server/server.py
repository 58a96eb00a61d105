"""The server: it connects the broker (decisions), the store thread (truth), readers, blobs and the cluster. Doors give it links.

In one turn of the event loop everything that arrived goes to the broker (`received`); then, if the store is idle, the store gets
the draft as one turn, and when it is committed, the answers are sent. While the store is busy the next draft grows: group commit
needs no timer.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from tasuki.blobs.blob import BlobStore
from tasuki.blobs.files import check_free
from tasuki.clocks import now
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES
from tasuki.core.broker import events
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.client_messages import ask_ends, result_of
from tasuki.core.broker.state import ClientSession, WorkerSession
from tasuki.core.broker.turn_builder import OWNER_PER_TURN, TurnEffects, ignore
from tasuki.core.cluster_messages import ServerInfo
from tasuki.core.election import EpochFenced, Lapsed, TookOver
from tasuki.core.machine import Closed, Hangup, Opened, Received, Send, Ticked
from tasuki.core.protocol import (
    AssignJobs,
    ErrorMessage,
    Message,
    PublishMessages,
    Reply,
    Results,
    Welcome,
    batches,
    error_message,
    outcome_bytes,
)
from tasuki.core.statistics import GroupCounts, current_minute
from tasuki.core.store_messages import Answers, HeldLease, LeaseStatus, Turn
from tasuki.errors import DiskFull, Fenced, InternalError, InvalidInput, TasukiError, Unavailable, discreet, from_wire
from tasuki.event_loop import BackgroundTasks, ignore_result
from tasuki.server.cluster import Cluster, SingleServer
from tasuki.server.message_delivery import MessageDelivery
from tasuki.server.queries import (
    QUICK_READS,
    STATISTICS,
    UNREAD_MIN_BYTES,
    Connection,
    PerConnectionQueue,
    Readers,
    UnreadAnswers,
    answer_query,
    query_bytes,
    routed_jobs,
)
from tasuki.server.refusal_log import RefusalLog
from tasuki.server.statistics import Statistics
from tasuki.server.transfers import BlobTransfers, may_read
from tasuki.server.upload_shares import UploadShares
from tasuki.stores.batching import StoreThread
from tasuki.stores.store import Reader, Store

T = TypeVar("T")
logger = logging.getLogger("tasuki.server")
TICK_S = 0.1
IDLE_TICK_S = 0.25  # while nothing waits, and no attempt runs; what has a time of its own is done at that time
LATE_RESULTS = 64  # results of up to 64 KiB each that are read for a slow peer at once
DISK_LOOK_S = 1.0
TOUCHES_PER_GRACE = 4  # an upload that lasts longer than the grace of unused blobs must not look unused
BUSY_ITEMS = 32  # waiting items from which on throughput comes before the latency of each
DRAFT_SOFT_BYTES = 64 * 1024 * 1024
DRAFT_SOFT_ITEMS = 20_000  # past this the doors stop reading until the store has caught up
DOWNLOADS_AT_ONCE = 4  # of one connection: each holds a descriptor, 2 MiB of chunks and what its peer has not read
OWNER_DOWNLOADS = 32  # of all connections of one owner; the others wait for one of them to end
FAILURE_LOG_S = 60.0
STOP_TIMEOUT_S = 3.0  # for a store that cannot write: what workers reported and we never recorded, they keep


class ServerConfig(events.BrokerConfig, frozen=True, kw_only=True):
    """Settings of a server: those of its broker, and those of its process."""

    data: Path
    """Folder whose disk is watched for free space."""
    readers: int = 1
    rests_after_s: float | None = None
    """Time without anything to do after which the store closes its connection until the next turn; None: never."""
    disk_floor_bytes: int = DISK_FLOOR_BYTES
    disk_floor_inodes: int = DISK_FLOOR_INODES


class Server:
    """One server, inside one event loop. After `start` doors call `opened`, `received` and `closed`; `stop` ends it in order."""

    def __init__(
        self,
        config: ServerConfig,
        open_store: Callable[[], Store],
        open_reader: Callable[[], Reader],
        blobs: BlobStore,
        cluster: Cluster | None = None,
        fault: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.config = config
        self.broker: Broker
        self._open_store = open_store
        self._blobs = blobs
        self.refusals = RefusalLog(logger)
        shares = UploadShares(blobs, self._referenced, config.blob_grace_s)
        self._transfers = BlobTransfers(blobs, lambda *arrived: self.tell(events.BlobArrived(*arrived)), self.refusals, shares)
        self._cluster = cluster or SingleServer()
        self._fault = fault
        self._numbers = itertools.count(1)
        self._links: dict[int, Connection] = {}
        self._busy = self._pumping = self._throttled = False
        self._behind: set[int] = set()
        """Connections that are not read from because too much of their owner waits for its turn."""
        self._readers = Readers(open_reader, config.readers)
        self._token_reader = Readers(open_reader)  # whoever comes in waits for nobody's `find`
        self._slow_reads: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By the identity that asks: it has one slow read at a time, over all its connections."""
        self._download_slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by owner
        self._unread = UnreadAnswers()
        self.statistics = Statistics()
        self._minute = current_minute(self.now().wall)
        self.messages = MessageDelivery(self._links, lambda conn: self.broker.sessions[conn].owner, self.statistics)
        self._tasks = BackgroundTasks()
        self._questions = PerConnectionQueue(self._query, self._tasks.spawn, at_once=config.readers, size_of=query_bytes)
        self._downloads = PerConnectionQueue(self._send_blob, self._tasks.spawn, at_once=DOWNLOADS_AT_ONCE)
        self._late = PerConnectionQueue(self._send_late, self._tasks.spawn, at_once=1)
        self._idle = asyncio.Event()
        self._stopping = False
        self._failure, self._failure_at = "", 0.0
        self.on_last_client: Callable[[], None] = lambda: None
        self.on_turn: Callable[[Turn, Answers], None] = lambda turn, answers: None

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the store (errors are raised here) and begin to tick."""
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(None, self._blobs.check)
        self._thread = StoreThread(self._open_store, self._deliver, self.config.rests_after_s)
        epoch = await self._loop.run_in_executor(None, self._thread.open, self.config.server_id)
        found = {"fires": self._thread.fires, "own_uid": os.getuid() if hasattr(os, "getuid") else None}
        self.broker = Broker(msgspec.structs.replace(self.config, epoch=epoch, shared=not epoch, **found))
        self._look_at_disk()
        await self._cluster.join(self)
        self._tasks.spawn(self._tick())

    def reachable_at(self, addresses: tuple[str, ...]) -> None:
        """Set the addresses at which the open doors can be reached; peers get them from this server and from others."""
        self.broker.addresses = addresses
        self._cluster.address_changed()

    async def stop(self) -> None:
        """Answer the requests under way, then close the store. New messages are ignored."""
        self._stopping = True
        if not self.broker.store_problem:
            self._write_rollup(self._minute, {})
        await self._cluster.leave()
        deadline = self._loop.time() + STOP_TIMEOUT_S
        self._loop.call_at(deadline, self._thread.hurry)
        while self._busy or (len(self.broker.builder) and self._loop.time() < deadline):
            self._idle.clear()
            self._pump()
            if self._busy:
                await self._idle.wait()
            else:  # a turn failed, and the next try waits
                await asyncio.sleep(TICK_S)
        for link in list(self._links.values()):
            link.close()
        await self._tasks.close()
        self._transfers.close()
        await self._loop.run_in_executor(None, self._thread.close)
        await self._readers.close()
        await self._token_reader.close()

    async def _tick(self) -> None:
        disk_at = touch_at = 0.0
        while True:
            await asyncio.sleep(self.broker.upkeep.until_due_s(self.now(), IDLE_TICK_S if self.broker.is_idle else TICK_S))
            now = self.now()
            if now.monotonic >= disk_at:
                disk_at = now.monotonic + DISK_LOOK_S
                self._look_at_disk()
            if now.monotonic >= touch_at:
                touch_at = now.monotonic + self.config.blob_grace_s / TOUCHES_PER_GRACE
                if puts := self._transfers.under_way():
                    self.tell(events.BlobsUnderWay(puts))
                self._transfers.sweep()
            self.tell(Ticked())
            self.messages.tick()
            self._cluster.tick(now)
            self._count_published()
            if (minute := current_minute(now.wall)) != self._minute:
                self._tasks.spawn(self._roll_up(self._minute))
                self._minute = minute

    async def _roll_up(self, minute: int) -> None:
        """Write what was counted in this minute; the leader adds the queue lengths."""
        counts: Mapping[str, GroupCounts] = {}
        try:
            if self.broker.epoch:
                counts = await self.ask(lambda reader: reader.counts())
        except TasukiError as error:
            logger.debug("the queue lengths could not be read: %s", error)
        self._write_rollup(minute, counts)

    def _count_published(self) -> None:
        self.statistics.published(self.broker.published)
        self.broker.published.clear()

    def _write_rollup(self, minute: int, counts: Mapping[str, GroupCounts]) -> None:
        self._count_published()
        rollup = self.statistics.rollup(minute, self.server_id, counts)
        if rollup is not None:
            self.broker.builder.ask("add_rollups", [rollup], ignore)
            self._pump()

    def tell(self, event: events.Event) -> None:
        """Give the broker an event, and the store its next turn if it is idle."""
        self._apply(event)
        self._pump()

    async def renew(self, claims: Sequence[HeldLease]) -> list[LeaseStatus]:
        """Renew leases in the name of their workers."""
        waiting: asyncio.Future[list[LeaseStatus]] = self._loop.create_future()
        waiting.add_done_callback(ignore_result)

        def answered(statuses: Sequence[LeaseStatus], effects: TurnEffects) -> None:
            if not waiting.done():
                waiting.set_result(list(statuses))

        def failed(error: TasukiError, effects: TurnEffects) -> None:
            if not waiting.done():
                waiting.set_exception(error)

        self.broker.builder.ask("renew", claims, answered, failed)
        self._pump()
        return await waiting

    now = staticmethod(now)

    @property
    def server_id(self) -> str:
        return self.config.server_id

    @property
    def info(self) -> ServerInfo:
        """The description that other servers get."""
        return self.broker.info

    def _look_at_disk(self) -> None:
        problem = ""
        try:
            check_free(self.config.data, 0, self.config.disk_floor_bytes, self.config.disk_floor_inodes)
        except DiskFull as error:
            problem = error.message
        self._apply(events.DiskSpace(problem))

    # ------------------------------------------------------------------------------------------------ doors

    def opened(self, link: Connection) -> int:
        conn = next(self._numbers)
        self._links[conn] = link
        self._apply(Opened(conn, link.peer))
        if self._throttled:
            link.pause_reading("the store is busy")
        return conn

    def received(self, conn: int, message: Message) -> None:
        if self._stopping:
            return
        self._apply(Received(conn, message))
        if type(message) is PublishMessages:  # nothing for the store
            self.messages.published(conn)
            return
        self._throttle()
        much = self.broker.paced.waiting or len(self.broker.builder) > OWNER_PER_TURN
        if much and conn not in self._behind and self.broker.is_behind(conn):
            self._wait_for_turn(conn)
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _wait_for_turn(self, conn: int) -> None:
        """Do not read from a peer, or from all with its owner, until the store has caught up with what they sent."""
        for behind in self.broker.behind_with(conn):
            if (link := self._links.get(behind)) is not None:
                self._behind.add(behind)
                link.pause_reading("its turn")

    def read(self) -> None:
        """Start a turn at once if the store is idle: all messages of one read from a connection were received."""
        if not self._busy and not self._stopping:
            self._pump()

    def closed(self, conn: int, reason: str, error: TasukiError | None = None) -> None:
        """Forget a connection that is gone. `error`: the one with which its door ended it."""
        session = self.broker.sessions.get(conn)
        if (link := self._forget(conn)) is not None:
            self._refused(link, error)
            if isinstance(session, WorkerSession) and session.deliveries and not self._stopping:
                text = f"worker {session.worker_id} left, and holds {len(session.deliveries)} leases: {reason}"
                self.refusals.write(link.peer.address, "WORKER_LOST", text)
            self._apply(Closed(conn, reason))
            self._tell_about_clients()

    def _forget(self, conn: int) -> Connection | None:
        """Drop the work for a connection; return the connection, if it was not dropped before."""
        link = self._links.pop(conn, None)
        if link is not None:
            for part in (self._transfers, self._questions, self._downloads, self._late, self.messages):
                part.forget(conn)
        return link

    def _tell_about_clients(self) -> None:
        sessions = self.broker.sessions
        if not self._stopping and all(isinstance(sessions.get(conn), WorkerSession) for conn in self._links):
            self.on_last_client()

    # ------------------------------------------------------------------------------------------------ turns

    def _pump(self) -> None:
        self._pumping = False
        if self._busy:
            return
        turn = self.broker.next_turn(self.now())
        if turn is None:
            return
        self._busy = True
        self._thread.submit(turn)
        for conn in [conn for conn in self._behind if not self.broker.is_behind(conn)]:
            self._behind.remove(conn)
            if (link := self._links.get(conn)) is not None:
                link.resume_reading("its turn")
        if self._throttled:
            self._throttled = False
            for link in self._links.values():
                link.resume_reading("the store is busy")

    def _throttle(self) -> None:
        """Stop reading when too much waits for the store."""
        draft = self.broker.builder
        if (len(draft) > DRAFT_SOFT_ITEMS or draft.size_bytes > DRAFT_SOFT_BYTES) and not self._throttled:
            self._throttled = True
            for link in self._links.values():
                link.pause_reading("the store is busy")

    def _deliver(self, turn: Turn, answers: Answers | TasukiError) -> None:
        self._loop.call_soon_threadsafe(self._delivered, turn, answers)

    def _delivered(self, turn: Turn, answers: Answers | TasukiError) -> None:
        self._busy = False
        self._fault("turn.before_answers")
        event: events.Event = events.TurnDone(turn, answers) if isinstance(answers, Answers) else events.TurnFailed(turn, answers)
        if isinstance(answers, TasukiError):
            self._log_failure(answers)
        else:
            self.on_turn(turn, answers)
            for lost in answers.reap:
                text = f"the lease of attempt {lost.attempt} is over: {lost.reason}"
                self.refusals.write(f"worker {lost.worker_id}", "LEASE_LOST", text, lost.job_id)
        commands = self.broker.apply(event, self.now())
        if len(self.broker.builder) < BUSY_ITEMS:
            # Little load: the answers leave first, and the next turn begins after them.
            self._perform(commands)
            if not self._pumping:
                self._pumping = True
                self._loop.call_soon(self._pump)
        else:
            # Under load the store works while the answers are encoded: both cores are busy.
            self._pump()
            self._perform(commands)
        if isinstance(answers, Answers):
            self.statistics.turn(turn, answers, self.now())
        if turn.fire and (due_s := self.broker.upkeep.until_due_s(self.now(), IDLE_TICK_S)) < IDLE_TICK_S:
            self._loop.call_later(due_s + 0.001, self.read)  # the tick was set before this turn told; timers may be 0.5 ms early
        self._fault("turn.answered")
        if not self._busy:
            self._idle.set()

    def _log_failure(self, error: TasukiError) -> None:
        """Log why a turn failed: peers are told less. The same cause, which comes with every try, once in an interval."""
        text, now_s = f"{error.code}: {error.message}", self.now().monotonic
        if text != self._failure or now_s - self._failure_at > FAILURE_LOG_S:
            self._failure, self._failure_at = text, now_s
            logger.warning("a turn of the store failed: %s", text)

    def _apply(self, event: events.Event) -> None:
        if commands := self.broker.apply(event, self.now()):
            self._perform(commands)

    def _perform(self, commands: list[events.Command]) -> None:
        together: list[Message] = []
        for command, following in itertools.zip_longest(commands, commands[1:]):
            match command:
                case Send():
                    together.append(command.message)
                    if type(refusal := command.message) is ErrorMessage:
                        self._refused(self._links.get(command.conn), from_wire(refusal.code, refusal.message, refusal.details))
                    if not _goes_with(command, following):
                        self._send(command.conn, together)
                        together = []
                case events.Deliver():
                    self.messages.add(command)
                case Hangup():
                    if (link := self._forget(command.conn)) is not None:
                        self._refused(link, command.error)
                        link.close(command.error)
                        self._tell_about_clients()
                case events.LogFenced():
                    if (link := self._links.get(command.conn)) is not None:
                        self.refusals.write(link.peer.address, Fenced.code, command.reason, command.job_id)
                case events.Query():
                    self._questions.add(command.conn, self._links[command.conn], command)
                case events.BlobPiece():
                    self._transfers.piece(command.conn, self._links[command.conn], command.chunk)
                case events.SendBlob():
                    self._downloads.add(command.conn, self._links[command.conn], command)
                case events.ReceiveBlob():
                    if (link := self._links.get(command.conn)) is not None:
                        self._transfers.begin(link, command)
                case events.DeleteBlobs():
                    self._tasks.spawn(self._delete_blobs(command))
                case events.AskEnded() | events.AskRevoked() | events.AskReady() | events.AskRouted():
                    self._tasks.spawn(self._ask(command))
                case (
                    TookOver()
                    | EpochFenced()
                    | Lapsed()
                    | events.Publish()
                    | events.Relay()
                    | events.StartRuns()
                    | events.NoteAssigned()
                ):
                    self._cluster.carry_out(command)
                case events.Detach():
                    self._tasks.spawn(self._detach(command))
                case events.Degrade():
                    self._tasks.spawn(self._degrade(command))

    def _refused(self, link: Connection | None, error: TasukiError | None) -> None:
        """Log a refusal; the HTTP door logs its own."""
        if link is not None and error is not None and link.peer.transport != "http":
            self.refusals.error(link.peer.address, error)

    def _send(self, conn: int, messages: list[Message]) -> None:
        link = self._links.get(conn)
        if link is None:
            return
        first = messages[0]
        if type(first) is Welcome:
            link.trust(self.config.frame_max_bytes, first.identity)
            link.codec = first.codecs[0] if first.codecs else link.codec
        if type(first) is Results and link.full:
            self._send_later(conn, link, first)
        else:
            link.send_together(messages)
            is_large = type(messages[-1]) in (AssignJobs, Results) and link.unread_bytes >= UNREAD_MIN_BYTES
            if is_large and (session := self.broker.sessions.get(conn)) is not None:  # else a Hangup follows
                self._unread.note(session.owner, link)

    # ------------------------------------------------------------------------------------------------ reads

    def _send_later(self, conn: int, link: Connection, results: Results) -> None:
        """Drop the results for a peer that has not read the earlier ones; they are read again from the store when it has."""
        job_ids = [item.job_id for item in results.items]
        for start in range(0, len(job_ids), LATE_RESULTS):
            self._late.add(conn, link, (conn, job_ids[start : start + LATE_RESULTS]))

    async def _send_late(self, link: Connection, late: tuple[int, list[str]]) -> None:
        conn, job_ids = late
        try:
            jobs = await self._readers.ask(lambda reader: reader.get(job_ids))
        except TasukiError as error:  # the client asks for these results again when it reconnects
            link.close(error)
            return
        session = self.broker.sessions.get(conn)
        if not isinstance(session, ClientSession):
            return
        ended = []
        for job in jobs:
            if job is not None and job.state.terminal:
                ended.append(result_of(job))
            elif job is not None:  # started again meanwhile: its next end is awaited, and may have come already
                self.broker.watch(session, job.job_id)
                ask_ends(self.broker, [job.job_id])
        for some in batches(ended, lambda item: outcome_bytes(item.outcome)):
            link.send(Results(list(some)))

    async def _query(self, link: Connection, query: events.Query) -> None:
        alone = asyncio.Lock() if query.verb in QUICK_READS else self._slow_reads.setdefault(query.identity.name, asyncio.Lock())
        try:
            async with alone:
                if query.conn not in self._links:  # gone while it waited
                    return
                self._count_published()
                current = self.statistics.since_rollup(self._minute, self.server_id) if query.verb == STATISTICS else None
                body = await self._readers.ask(lambda reader: answer_query(reader, query, current))
        except RecursionError:
            link.send(error_message(query.msg_id, InvalidInput(f"{query.verb}: a parameter is nested too deep")))
        except TasukiError as error:
            self._refused(link, error)
            link.send(error_message(query.msg_id, error if query.identity.admin else discreet(error)))
        except Exception:  # a defect of ours: the caller must not wait for ever
            logger.exception("%s failed", query.verb)
            link.send(error_message(query.msg_id, discreet(InternalError(""))))
        else:
            if query.question is not None:
                self.tell(events.JobSeen(query.conn, query.msg_id, query.question, body))
            else:
                link.send(Reply(query.msg_id, body))
                if link.unread_bytes >= UNREAD_MIN_BYTES:
                    self._unread.note(query.identity.owner, link)

    async def _ask(self, command: events.StoreQuestion) -> None:
        """Ask the store what no turn told. If it cannot be asked now, the broker asks again in a second."""
        event: events.Event
        try:
            if isinstance(command, events.AskEnded):
                event = events.SomeEnded(await self._readers.ask(lambda reader: reader.ended_among(command.job_ids)))
            elif isinstance(command, events.AskReady):
                page = await self._readers.ask(lambda reader: reader.ready_queues(command.place, limit=command.limit))
                event = events.ReadyFound(page)
            elif isinstance(command, events.AskRouted):
                event = events.RoutedFound(await self._readers.ask(lambda reader: routed_jobs(reader, command)))
            else:
                revoked = await self._token_reader.ask(lambda reader: reader.revoked_among(command.token_ids))
                event = events.SomeRevoked(revoked)
        except Exception as error:
            if isinstance(error, Unavailable):
                logger.debug("the store could not be asked for changes by other servers: %s", error)
            else:
                logger.exception("%s failed", type(command).__name__)
            if isinstance(command, events.AskReady):
                event = events.ReadyFound(None)
            elif isinstance(command, events.AskRouted):
                event = events.RoutedFound(None)
            else:
                return
        self.tell(event)

    async def _detach(self, command: events.Detach) -> None:
        link = self._links.get(command.conn)
        if link is None:
            return
        try:
            changed = await self._cluster.detach(command)
            if command.now:
                self.tell(events.WorkerDetached(command.worker_id))
            link.send(Reply(command.msg_id, {"worker_id": command.worker_id, "changed": changed}))
        except TasukiError as error:
            link.send(error_message(command.msg_id, error))

    async def _degrade(self, command: events.Degrade) -> None:
        link = self._links.get(command.conn)
        if link is None:
            return
        try:
            await self._cluster.degrade()
            link.send(Reply(command.msg_id, {"server_id": command.server_id}))
        except TasukiError as error:
            link.send(error_message(command.msg_id, error))

    async def ask(self, question: Callable[[Reader], T]) -> T:
        """Return the answer of a store reader, which has a connection of its own."""
        return await self._readers.ask(question)

    async def ask_tokens(self, question: Callable[[Reader], T]) -> T:
        """Return the answer of the reader that does nothing but look up tokens."""
        return await self._token_reader.ask(question)

    async def _referenced(self, sha256s: Sequence[str]) -> set[str]:
        """Return those of the blobs to which jobs refer."""
        return await self._readers.ask(lambda reader: {sha256 for sha256 in sha256s if reader.blob_owners(sha256, limit=1)})

    async def _delete_blobs(self, command: events.DeleteBlobs) -> None:
        self.tell(events.BlobsDeleted(command.epoch, await self._transfers.delete(command.places)))

    async def _send_blob(self, link: Connection, command: events.SendBlob) -> None:
        get, owner = command.get, command.identity.owner
        slots = self._download_slots.setdefault(owner, asyncio.Semaphore(OWNER_DOWNLOADS))
        try:
            async with slots:
                if command.conn not in self._links:  # gone while it waited
                    return
                allowed, place = await self._readers.ask(
                    lambda reader: (may_read(reader, command), reader.blob_places([get.sha256])[0])
                )
                if allowed and command.worker_id and not get.offset:
                    self.statistics.fetched(get.job_id, get.sha256)
                await self._transfers.send(link, allowed, command, place)
        except TasukiError as error:
            link.send(error_message(get.msg_id, error))


def _goes_with(first: Send, following: events.Command | None) -> bool:
    """Return whether both messages leave in one write: a worker that gets a record and its next jobs is woken once.

    Results are sent alone: after each of them the peer may turn out to be one that does not read.
    """
    if type(following) is not Send or following.conn != first.conn:
        return False
    return not isinstance(first.message, Welcome | Results) and not isinstance(following.message, Welcome | Results)
