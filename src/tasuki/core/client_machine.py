"""The client's decisions: `apply(event, now) -> commands`. Pure.

Theory of operation. Every call is kept with its message until it is answered. After a lost connection every call that is safe
to repeat is sent again: a submit, because the same id with the same body is the same job; a watch, because it only asks. A
result that was recorded while the client was away comes back by asking for its job again. A call that retries an ended job is
sent once: the first time may have counted, and the job may have succeeded since. Its caller learns that the outcome is not known.
A call that the server could not read is not sent again either: it would end the next connection too.

The client leaves a silent server: after two heartbeats, or a Hello, without an answer. With several servers it leaves sooner,
since there is another one to connect to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tasuki.core import protocol
from tasuki.core.address import Address
from tasuki.core.machine import Closed, Hangup, Now, Opened, Received, Send, Ticked
from tasuki.core.message_requests import MessageCommand, MessageEvent, MessageRequests, MessagesArrived, PublishNow
from tasuki.core.reconnect import HELLO_QUICK_S, Connect, Redial
from tasuki.errors import TasukiError, Unavailable, VersionMismatch, from_wire

BEAT_QUICK_S = 5.0  # where there is another server to turn to
BEATS_UNANSWERED = 2.5  # two, and time for the second one's answer
WATCH_MAX = 256  # jobs of one watch: small enough that the server reads a few of them per turn
RETRY_AFTER_S = 0.5  # a call that the server answered with "not now"
FATAL_CODES = frozenset({"UNAUTHORIZED", "FORBIDDEN", "VERSION", "INVALID"})  # of a Hello: it will be no better next time
AGAIN_CODES = frozenset({"UNAVAILABLE", "OVERLOADED"})
UNREADABLE_CODES = frozenset({"PROTOCOL", "TOO_LARGE"})  # of a connection: the server could not read one of the calls under way
ONCE_VERBS = frozenset({"requeue", "token.revoke", "cache.remove"})  # saying them twice is not the same as saying them once
NOT_KNOWN = "it is not known whether the request was carried out; look at the state of what it named before asking again"


class Call(msgspec.Struct, frozen=True):
    """Request to send; its msg_id is the machine's. It is sent again after a reconnect, if that is safe."""

    ticket: int
    make: Callable[[int], protocol.Message]
    watch: tuple[str, ...] = ()
    """Jobs of a submit whose results the server delivers once it has accepted them."""


class Watch(msgspec.Struct, frozen=True):
    """Request to deliver the results of jobs that the server knows."""

    job_ids: list[str]


class Unwatch(msgspec.Struct, frozen=True):
    """End of the interest in these jobs."""

    job_ids: list[str]


class Unsendable(msgspec.Struct, frozen=True):
    """A message that the driver could not encode, now or later."""

    msg_id: int
    error: TasukiError


class CallAnswered(msgspec.Struct, frozen=True):
    """End of a call: an Accepted, a CacheAck or the body of a Reply, or an error."""

    ticket: int
    answer: Any = None
    error: TasukiError | None = None


class ResultsArrived(msgspec.Struct, frozen=True):
    """Results of watched jobs that are terminal."""

    items: list[protocol.JobResult]


class Welcomed(msgspec.Struct, frozen=True):
    """The server accepted the client's Hello."""

    welcome: protocol.Welcome


class WatchRefused(msgspec.Struct, frozen=True):
    """The server does not know these jobs, or they belong to another submitter."""

    job_ids: list[str]
    error: TasukiError


class Failed(msgspec.Struct, frozen=True):
    """The server will never accept the client; every waiting call is answered with this error."""

    error: TasukiError


Event = Opened | Received | Closed | Ticked | Call | Watch | Unwatch | Unsendable | MessageEvent
Command = Connect | Send | Hangup | CallAnswered | ResultsArrived | Welcomed | WatchRefused | Failed | MessageCommand


class _Waiting(msgspec.Struct):
    ticket: int
    make: Callable[[int], protocol.Message]
    lasting: bool
    watch: tuple[str, ...]
    said: bool = False
    again_at: float | None = None


def safe_to_repeat(message: protocol.Message) -> bool:
    """Return True if sending the message twice has the effect of sending it once, whatever happened in between."""
    match message:
        case protocol.SubmitJobs():
            return message.on_failed == "return"
        case protocol.Request():
            return message.verb not in ONCE_VERBS
        case protocol.PublishMessages():
            return not message.items
        case _:
            return True


class ClientMachine:
    """One client process's calls and watched jobs."""

    def __init__(self, hello: protocol.HelloClient, *, addresses: Sequence[Address], jitter: Callable[[], float]) -> None:
        self.online = False
        self._hello = hello
        self._redial = Redial(addresses, jitter)
        self._conn: int | None = None
        self._msg_id = 0
        self._calls: dict[int, _Waiting] = {}
        self._watching: dict[str, None] = {}
        self._watches: dict[int, list[str]] = {}
        self._watch_again: list[tuple[float, list[str]]] = []
        self._messages = MessageRequests(self._next_id)
        self._beat_at = 0.0
        self._idle_timeout_s = 60.0
        self._heard_at = 0.0
        self._error: TasukiError | None = None

    def apply(self, event: Event, now: Now) -> list[Command]:
        match event:
            case Received():
                if event.conn != self._conn:
                    return []
                self._heard_at = now.monotonic
                return self._received(event.message, now)
            case Call():
                return self._call(event)
            case Watch():
                if self._error is not None:
                    return [WatchRefused(event.job_ids, self._error)]
                self._watching.update(dict.fromkeys(event.job_ids))
                return self._ask_results(event.job_ids) if self.online else []
            case Unwatch():
                for job_id in event.job_ids:
                    self._watching.pop(job_id, None)
                return []
            case Ticked():
                return self._ticked(now)
            case Unsendable():
                return self._unsendable(event)
            case Opened():
                self._conn = event.conn
                self._heard_at = now.monotonic
                self._msg_id += 1
                ours = {"msg_id": self._msg_id, "version": protocol.PROTOCOL_VERSION, "oldest": protocol.PROTOCOL_OLDEST}
                return [Send(event.conn, msgspec.structs.replace(self._hello, **ours))]
            case Closed():
                return self._offline(event, now)
            case _:
                return self._about_messages(event)

    def _next_id(self) -> int:
        self._msg_id += 1
        return self._msg_id

    def _about_messages(self, event: MessageEvent) -> list[Command]:
        if self._error is not None and not isinstance(event, PublishNow):
            return [*self._messages.refused((event.pattern, event.queue), self._error)]
        return self._sends(self._messages.take(event, online=self.online))

    def _sends(self, messages: Sequence[protocol.Message]) -> list[Command]:
        return [Send(self._conn, message) for message in messages if self._conn is not None]

    # ------------------------------------------------------------------------------------------------ calls

    def _call(self, call: Call) -> list[Command]:
        if self._error is not None:
            return [CallAnswered(call.ticket, error=self._error)]
        self._msg_id += 1
        message = call.make(self._msg_id)
        waiting = self._calls[self._msg_id] = _Waiting(call.ticket, call.make, safe_to_repeat(message), call.watch)
        if not self.online or self._conn is None:
            return []
        waiting.said = True
        return [Send(self._conn, message)]

    def _say(self, waiting: _Waiting) -> Send:
        """Send the call under a new msg_id: an answer to an earlier one is ignored."""
        assert self._conn is not None
        self._msg_id += 1
        self._calls[self._msg_id] = waiting
        waiting.said, waiting.again_at = True, None
        return Send(self._conn, waiting.make(self._msg_id))

    def _unsendable(self, event: Unsendable) -> list[Command]:
        waiting = self._calls.pop(event.msg_id, None)
        if waiting is not None:
            return [CallAnswered(waiting.ticket, error=event.error)]
        if (refused := self._messages.unsendable(event.msg_id, event.error)) is not None:
            return [*refused]
        job_ids = self._watches.pop(event.msg_id, None)
        if job_ids is not None:
            return self._watch_refused(job_ids, event.error)
        if self.online or self._conn is None:
            return []
        return [*self._fail(event.error), Hangup(self._conn, event.error)]  # the Hello itself

    def _ask_results(self, job_ids: list[str]) -> list[Command]:
        commands: list[Command] = []
        assert self._conn is not None
        for start in range(0, len(job_ids), WATCH_MAX):
            some = job_ids[start : start + WATCH_MAX]
            self._msg_id += 1
            self._watches[self._msg_id] = some
            commands.append(Send(self._conn, protocol.Request(self._msg_id, "watch", {"job_ids": some})))
        return commands

    # ------------------------------------------------------------------------------------------------ the server's words

    def _received(self, message: protocol.Message, now: Now) -> list[Command]:
        match message:
            case protocol.Results():
                watching = self._watching
                for item in message.items:
                    watching.pop(item.job_id, None)
                return [ResultsArrived(message.items)]
            case protocol.Accepted():
                return self._accepted(message)
            case protocol.DeliverMessages():
                return [MessagesArrived(message)]
            case protocol.Reply():
                return self._replied(message)
            case protocol.CacheAck():
                waiting = self._calls.pop(message.corr_id, None)
                return [CallAnswered(waiting.ticket, message)] if waiting is not None else []
            case protocol.Welcome():
                return self._welcomed(message, now)
            case protocol.ErrorMessage():
                return self._refused(message, now)
            case protocol.HeartbeatAnswer():
                if message.servers:
                    self._redial.learn(message.servers)
                return []
            case _:
                return []  # newer than this client

    def _accepted(self, accepted: protocol.Accepted) -> list[Command]:
        waiting = self._calls.pop(accepted.corr_id, None)
        if waiting is None:
            return []
        # Results always come after the Accepted of their job, so that none of these can have arrived before.
        # A refused one leaves the watch of an earlier submit of its id as it is.
        refused = {item.index for item in accepted.exceptions if item.code}
        watch = waiting.watch if not refused else [one for place, one in enumerate(waiting.watch) if place not in refused]
        self._watching.update(dict.fromkeys(watch))
        return [CallAnswered(waiting.ticket, accepted)]

    def _replied(self, reply: protocol.Reply) -> list[Command]:
        if self._watches.pop(reply.corr_id, None) is not None:
            return []
        waiting = self._calls.pop(reply.corr_id, None)
        if waiting is None:
            return [*(self._messages.answered(reply) or ())]
        return [CallAnswered(waiting.ticket, reply.body)]

    def _welcomed(self, welcome: protocol.Welcome, now: Now) -> list[Command]:
        assert self._conn is not None
        try:
            protocol.check_version(welcome)
        except VersionMismatch as error:
            return [*self._fail(error), Hangup(self._conn, error)]
        self.online = True
        self._redial.connected(now.monotonic, welcome.servers)
        self._idle_timeout_s = welcome.idle_timeout_s or 60.0
        self._beat_at = now.monotonic + self._beat_every_s()
        commands: list[Command] = [Welcomed(welcome)]
        calls, self._calls = self._calls, {}
        commands += [self._say(waiting) for waiting in calls.values()]
        self._watches.clear()
        self._watch_again.clear()
        commands += self._ask_results(list(self._watching))
        return commands + self._sends(self._messages.welcomed())

    def _beat_every_s(self) -> float:
        every_s = self._idle_timeout_s / 3
        return min(BEAT_QUICK_S, every_s) if self._redial.several else every_s

    def _refused(self, message: protocol.ErrorMessage, now: Now) -> list[Command]:
        error = from_wire(message.code, message.message, message.details)
        if not message.corr_id:
            if message.code in FATAL_CODES and not self.online:
                return self._fail(error)
            # Closed follows, and a new connection.
            return self._end_said(error) if message.code in UNREADABLE_CODES and self.online else []
        job_ids = self._watches.pop(message.corr_id, None)
        if job_ids is not None:
            if error.retryable:
                self._watch_again.append((now.monotonic + RETRY_AFTER_S, job_ids))
                return []
            return self._watch_refused(job_ids, error)
        waiting = self._calls.get(message.corr_id)
        if waiting is None:
            return [*(self._messages.answered(message) or ())]
        if waiting.lasting and message.code in AGAIN_CODES:
            waiting.again_at = now.monotonic + RETRY_AFTER_S
            return []
        del self._calls[message.corr_id]
        if not waiting.lasting and message.code == "UNAVAILABLE":  # going down, or a store that did not say: it may be done
            error = Unavailable(f"{error.message}; {NOT_KNOWN}")
        return [CallAnswered(waiting.ticket, error=error)]

    def _watch_refused(self, job_ids: list[str], error: TasukiError) -> list[Command]:
        """Watch the jobs of a refused watch one by one, to find the unknown one."""
        if len(job_ids) > 1 and self._conn is not None:
            return [command for job_id in job_ids for command in self._ask_results([job_id])]
        for job_id in job_ids:
            self._watching.pop(job_id, None)
        return [WatchRefused(job_ids, error)]

    def _fail(self, error: TasukiError) -> list[Command]:
        self._error = error
        self._redial.due_at = None
        calls, self._calls = self._calls, {}
        watching, self._watching = list(self._watching), {}
        commands: list[Command] = [Failed(error), *(CallAnswered(waiting.ticket, error=error) for waiting in calls.values())]
        commands += self._messages.fail(error)
        return [*commands, WatchRefused(watching, error)] if watching else commands

    # ------------------------------------------------------------------------------------------------ time, connection

    def _offline(self, event: Closed, now: Now) -> list[Command]:
        if self._conn is not None and event.conn != self._conn:
            return []
        self._conn = None
        self.online = False
        if self._error is None:
            self._redial.lost(now.monotonic)
        error = Unavailable(f"the connection to the server was lost before it answered ({event.reason}); {NOT_KNOWN}")
        return self._end_said(error, lasting=False)

    def _end_said(self, error: TasukiError, *, lasting: bool = True) -> list[Command]:
        """Answer calls that were sent with an error: those that are sent once, with `lasting` all of them."""
        ended = [msg_id for msg_id, one in self._calls.items() if one.said and (lasting or not one.lasting)]
        return [CallAnswered(self._calls.pop(msg_id).ticket, error=error) for msg_id in ended]

    def _ticked(self, now: Now) -> list[Command]:
        due_at = self._redial.due_at
        if self._conn is None:
            return [self._redial.dialed()] if due_at is not None and due_at <= now.monotonic else []
        if not self.online:
            silent = now.monotonic - self._heard_at > (HELLO_QUICK_S if self._redial.several else protocol.HANDSHAKE_TIMEOUT_S)
            return [Hangup(self._conn, Unavailable("the server does not answer the Hello"))] if silent else []
        commands: list[Command] = []
        if now.monotonic - self._heard_at > self._beat_every_s() * BEATS_UNANSWERED:
            return [Hangup(self._conn, Unavailable("the server does not answer"))]
        if now.monotonic >= self._beat_at:
            self._beat_at = now.monotonic + self._beat_every_s()
            self._msg_id += 1
            commands.append(Send(self._conn, protocol.Heartbeat(self._msg_id)))
        due = [job_ids for at, job_ids in self._watch_again if at <= now.monotonic]
        self._watch_again = [(at, job_ids) for at, job_ids in self._watch_again if at > now.monotonic]
        for job_ids in due:
            commands += self._ask_results([job_id for job_id in job_ids if job_id in self._watching])
        due_calls = [msg_id for msg_id, one in self._calls.items() if one.again_at is not None and one.again_at <= now.monotonic]
        commands += [self._say(self._calls.pop(msg_id)) for msg_id in due_calls]
        return commands
