"""The servers of a `Harness` (harness.py): a broker each, what its driver would keep, and its turn at the store they share.

Touches nothing: the world moves messages, commits and time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tasuki.core.address import Address
from tasuki.core.broker.broker import Broker, error_message
from tasuki.core.broker.events import (
    AskEnded,
    AskRevoked,
    BrokerConfig,
    Deposed,
    Elected,
    Hinted,
    Publish,
    Query,
    SomeEnded,
    SomeRevoked,
    TakeoverDone,
    TurnDone,
    TurnFailed,
)
from tasuki.core.broker.events import Command as BrokerCommand
from tasuki.core.broker.events import Event as BrokerEvent
from tasuki.core.cluster_messages import Hint
from tasuki.core.job import Job
from tasuki.core.machine import Hangup, Now, Send
from tasuki.core.protocol import Message, Reply
from tasuki.core.store_messages import Answers, Turn
from tasuki.errors import StaleEpoch, TasukiError
from tasuki.server.queries import answer_query
from tasuki.stores.batching import execute
from tasuki.wire.messages import encode

if TYPE_CHECKING:
    from tasuki.testing.harness import Harness

OWN_UID = 1000


class ServerNode:
    """One server process. `broker` is None while it is dead; a frozen one keeps its connections and answers nothing."""

    def __init__(self, world: Harness, server_id: str, address: Address, *, shared: bool, lease_ttl_s: float) -> None:
        self.world = world
        self.server_id = server_id
        self.address = address
        self.frozen = False
        self.broker: Broker | None = None
        self.turn: Turn | None = None
        """Taken by the store, not committed."""
        self.answers: Answers | None = None
        """Committed; the broker has not heard of it."""
        self.hints: deque[Hint] = deque()
        """From other servers, on their way."""
        self._shared = shared
        self._lease_ttl_s = lease_ttl_s

    @property
    def awake(self) -> bool:
        return self.broker is not None and not self.frozen

    @property
    def leads(self) -> int:
        """The epoch under which it believes to lead; 0: it does not."""
        return self.broker.duties.epoch if self.broker is not None else 0

    def start(self) -> None:
        epoch = 0
        if not self._shared:  # whoever opens such a store leads it
            epoch = self.world.store.epoch()[0] + 1
            assert self.world.store.take_over(self.server_id, epoch)
        self._begin(epoch)

    def _begin(self, epoch: int, **settings: Any) -> None:
        config = BrokerConfig(
            server_id=self.server_id,
            epoch=epoch,
            shared=self._shared,
            own_uid=OWN_UID,
            lease_ttl_s=self._lease_ttl_s,
            **settings,
        )
        self.broker = Broker(config)
        self.broker.addresses = (str(self.address),)

    def die(self) -> None:
        """SIGKILL: a turn that was not committed never was; nothing that was not sent is sent."""
        self.broker = self.turn = self.answers = None
        self.frozen = False
        self.hints.clear()

    def now(self) -> Now:
        """What its clocks say."""
        return self.world.now()

    def apply(self, event: BrokerEvent) -> None:
        if self.broker is not None:
            self._perform(self.broker.apply(event, self.now()))

    def _perform(self, commands: list[BrokerCommand]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._send(command.conn, command.message)
                case Hangup():
                    self._hang_up(command)
                case Query():
                    self._answer_query(command)
                case Publish() | TakeoverDone() | Deposed():
                    self._told(command)
                case AskEnded() | AskRevoked():
                    self._ask(command)
                case _:
                    raise AssertionError(f"no blobs travel in this world: {command}")

    def _hang_up(self, command: Hangup) -> None:
        error = command.error
        last_words = encode(error_message(0, error)) if error else b""
        self.world.hang_up(command.conn, last_words, error.message if error else "")

    def _told(self, command: Publish | TakeoverDone | Deposed) -> None:
        """What concerns the other servers; the world is also the election, and counts every win."""
        match command:
            case Publish():
                self.world.hint(self, command.hint)
            case TakeoverDone():
                self.apply(Elected(command.epoch if command.done else 0))
            case Deposed():
                self.apply(Elected(0))

    def _ask(self, command: AskEnded | AskRevoked) -> None:
        if isinstance(command, AskEnded):
            self.apply(SomeEnded(self.world.store.ended_among(command.job_ids)))
        else:
            self.apply(SomeRevoked(self.world.store.revoked_among(command.token_ids)))

    def _send(self, conn: int, message: Message) -> None:
        link = self.world.links.get(conn)
        if link is not None and not link.mute and not link.loses(message) and (data := encode(message)):
            link.to_node.append(data)

    def _answer_query(self, query: Query) -> None:
        try:
            self._send(query.conn, Reply(query.msg_id, answer_query(self.world.store, query)))
        except TasukiError as error:
            self._send(query.conn, error_message(query.msg_id, error))

    # -- the store ------------------------------------------------------------------------------------------------
    def take_turn(self) -> bool:
        """If it has none under way, the store takes what the broker has drafted."""
        if self.broker is None or self.frozen or self.turn is not None:
            return False
        self.turn = self.broker.next_turn(self.now())
        return self.turn is not None

    def commit_turn(self) -> None:
        """The turn becomes durable; the broker does not know it yet."""
        assert self.turn is not None
        assert self.answers is None
        turn, world = self.turn, self.world
        if (error := world.refuse(turn)) is not None:
            self._turn_failed(error)
            return
        world.turns += 1
        before = world.jobs([*(report.job_id for report in turn.finish), *(report.job_id for report in turn.fail)])
        try:
            answers = execute(world.store, turn)
        except StaleEpoch as stale:
            self._turn_failed(stale)
            return
        self._tell_history(turn, answers, before)
        if (error := world.lose_answer(turn)) is not None:
            self._turn_failed(error)
            return
        self.answers = answers

    def answer_turn(self) -> None:
        """The broker hears of the commit, and sends what follows from it."""
        assert self.turn is not None
        assert self.answers is not None
        turn, answers = self.turn, self.answers
        self.turn = self.answers = None
        self.apply(TurnDone(turn, answers))

    def _turn_failed(self, error: TasukiError) -> None:
        assert self.turn is not None
        turn, self.turn = self.turn, None
        self.apply(TurnFailed(turn, error))

    def _tell_history(self, turn: Turn, answers: Answers, before: dict[str, Job | None]) -> None:
        history, store = self.world.history, self.world.store
        history.submitted([*turn.submit, *turn.rerun], [*answers.submit, *answers.rerun])
        history.reported("finish", turn.finish, [before[report.job_id] for report in turn.finish], answers.finish)
        history.reported("fail", turn.fail, [before[report.job_id] for report in turn.fail], answers.fail)
        for grants in answers.lease:
            for grant, job in zip(grants, store.get([grant.job_id for grant in grants]), strict=True):
                assert job is not None
                history.granted(grant, job)

    def choices(self) -> list[Callable[[], object]]:
        """What of the store and the other servers could reach it next."""
        if not self.awake:
            return []
        found: list[Callable[[], object]] = [self._hear_hint] if self.hints else []
        if self.answers is not None:
            found.append(self.answer_turn)
        elif self.turn is not None:
            found.append(self.commit_turn)
        return found

    def _hear_hint(self) -> None:
        self.apply(Hinted(self.hints.popleft()))
