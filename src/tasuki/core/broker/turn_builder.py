"""The next turn of a server: questions to the store, and the functions that get the answers. Pure.

A conversation is a message of a peer and everything that follows from it. It calls `ask` with a verb of
`store_messages.VERBS`, some items, and `reply`, which gets the answers to exactly these items once the turn is committed. If the
turn was not stored, `failed` gets the error and tells the peer. A question without `failed` is asked again in the next turn, with
the same reply: reports, renewals and reads are safe to repeat, because an exact repeat gets the stored answer. A question costs
one small struct, however many items it has.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import msgspec

from tasuki.core.broker.events import Command
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import JobResult, Message, Results, batches, outcome_bytes
from tasuki.core.store_messages import Answers, JobKind, Turn
from tasuki.errors import TasukiError

REPLY_ORDER = (
    ("finish",),
    ("fail",),
    ("start",),
    ("renew",),
    ("lease",),
    ("submit", "rerun"),
    ("cancel", "requeue"),
    ("held",),
    ("get", "cached_files"),
    ("token",),
    ("add_token", "revoke_token", "tokens", "note", "pause"),
    ("release", "end_leases"),
    ("place_blobs",),
    ("blobs_stored",),
    ("put_cache", "remove_cache"),
    ("add_rollups",),
)
"""Order of the replies after a turn: reports and leases first. Verbs of one group reply in the order of their questions."""

OWNER_PER_TURN = 4096  # items of one owner, a tenth of a second of the store; past this its peers are not read from
OWNER_ITEM_BYTES = 4096  # of payloads and results that count as one item more
REPORTED_PER_TURN = 1024  # items of one owner's workers; further ones are paced

_RANK = {verb: rank for rank, verbs in enumerate(REPLY_ORDER) for verb in verbs}


class TurnEffects:
    """Commands that the end of a turn leads to, and the results that clients get; replies add to both."""

    def __init__(self, now: Now, cut: Collection[int] = ()) -> None:
        self.now = now
        self.cut = cut
        """Positions of the lease requests whose walk was cut short."""
        self.commands: list[Command] = []
        self.results: defaultdict[int, list[JobResult]] = defaultdict(list)
        """Results by connection, sent in as few frames as possible."""

    def send(self, conn: int, message: Message) -> None:
        self.commands.append(Send(conn, message))

    def all_commands(self) -> list[Command]:
        """Return all commands, with the results as the last messages."""
        for conn, items in self.results.items():
            some_at_a_time = batches(items, lambda ending: outcome_bytes(ending.outcome))
            self.commands += [Send(conn, Results(list(some))) for some in some_at_a_time]
        return self.commands


OnAnswers = Callable[[Sequence[Any], TurnEffects], None]
OnFailure = Callable[[TasukiError, TurnEffects], None]


def ignore(_outcome: object, _effects: TurnEffects) -> None:
    """Reply, or failure, of a question whose answer interests nobody."""


class Question(msgspec.Struct, frozen=True):
    """Items start:stop of a verb's list, and the functions that get their answers or the error."""

    rank: int
    """Place of the verb in REPLY_ORDER."""
    verb: str
    start: int
    stop: int
    reply: OnAnswers
    failed: OnFailure | None
    owner: str


_rank = attrgetter("rank")


class TurnBuilder:
    """Collects the questions of one turn."""

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        """Lists of items by verb: the fields of the turn."""
        self.queues: dict[tuple[str, JobKind, str], None] = {}
        """Queues of the jobs that the turn submits (as ReadyQueue, which would cost more to make), in the order of arrival."""
        self.size_bytes = 0
        """Size of the payloads and results in it."""
        self.by_owner: dict[str, int] = {}
        """Number of items in it, by the owner of the peer that asks; large ones count for several."""
        self._questions: list[Question] = []
        self._size = 0

    def __len__(self) -> int:
        """Return how much waits, items and questions; backpressure depends on it."""
        return self._size

    @property
    def new_jobs(self) -> int:
        return len(self.items.get("submit", ())) + len(self.items.get("rerun", ()))

    def ask(
        self,
        verb: str,
        items: Sequence[Any],
        reply: OnAnswers,
        failed: OnFailure | None = None,
        owner: str = "",
        size_bytes: int = 0,
    ) -> None:
        """Add items to the verb's list of the turn; see the module's docstring for `reply` and `failed`. With `owner` they count
        for what its peers may add; `size_bytes` of payloads and results are in them."""
        rank = _RANK[verb]
        waiting = self.items.get(verb)
        if waiting is None:
            waiting = self.items[verb] = []
        start = len(waiting)
        waiting.extend(items)
        self._questions.append(Question(rank, verb, start, len(waiting), reply, failed, owner))
        self._size += len(items) + 1
        self.size_bytes += size_bytes
        if owner:
            self.by_owner[owner] = self.by_owner.get(owner, 0) + len(items) + size_bytes // OWNER_ITEM_BYTES

    def repeat(self, question: Question, items: Sequence[Any]) -> None:
        """Ask a question of a turn that failed again."""
        self.ask(question.verb, items, question.reply, owner=question.owner)

    def split_reads(self, limit: int) -> TurnBuilder:
        """Leave reads past `limit` jobs to a new builder, and return it: rows stay in memory until they are sent."""
        following = TurnBuilder()
        job_ids = self.items.get("get", [])
        if len(job_ids) <= limit:
            return following

        def is_left(question: Question) -> bool:
            return question.verb == "get" and question.start > 0 and question.stop > limit

        left = list(filter(is_left, self._questions))
        for read in left:
            following.ask("get", job_ids[read.start : read.stop], read.reply, read.failed, read.owner)
        if left:
            del job_ids[left[0].start :]
            self._questions = list(filterfalse(is_left, self._questions))
        return following

    def turn(self) -> Turn:
        """Return the finished turn."""
        return Turn(**self.items, context=self)

    def questions(self) -> list[Question]:
        """Return all questions in the order of their replies."""
        return sorted(self._questions, key=_rank)

    def done(self, answers: Answers, effects: TurnEffects) -> None:
        """Give every question its answers: the turn is committed."""
        for question in self.questions():
            question.reply(getattr(answers, question.verb)[question.start : question.stop], effects)

    def failed(self, error: TasukiError, effects: TurnEffects, following: TurnBuilder) -> None:
        """Give every question the error, or ask it again in the `following` turn."""
        for question in self.questions():
            if question.failed is not None:
                question.failed(error, effects)
            else:
                following.repeat(question, self.items[question.verb][question.start : question.stop])


PACED_PER_TURN = 256  # items of one owner: a few ms of the store, which everybody else waits for
PACED_MAX_BYTES = 16 * 1024 * 1024  # that wait, of one owner; past this its connections are not read from
PACED_ITEM_BYTES = 512  # of memory that an item takes beside its result


class PacedQuestion(msgspec.Struct):
    """A question whose items are asked in parts; the reply gets all answers together."""

    verb: str
    items: Sequence[Any]
    reply: OnAnswers
    item_bytes: int
    asked: int = 0
    answers: list[Any] = msgspec.field(default_factory=list)

    def answered(self, answers: Sequence[Any], effects: TurnEffects) -> None:
        """Take the answers of one part. Parts are answered in order, also after a turn that failed."""
        self.answers += answers
        if len(self.answers) == len(self.items):
            self.reply(self.answers, effects)


class PacedQuestions:
    """Questions of workers about leases that their sessions were not given, or about more than a turn takes of one owner: each
    turn asks some items of every owner.

    An outbox of an earlier connection or process is judged by the store alone, and so is a lease that was never this worker's.
    However many of them come, and however often a worker names its own lease, the turn that carries them stays short.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, deque[PacedQuestion]] = {}
        """Questions that are not all asked yet, by owner."""
        self._bytes: Counter[str] = Counter()

    def add(self, owner: str, verb: str, items: Sequence[Any], reply: OnAnswers, size_bytes: int = 0) -> None:
        """Add a question of this owner, behind its others; `size_bytes` of results are in its items."""
        if items:
            question = PacedQuestion(verb, items, reply, PACED_ITEM_BYTES + size_bytes // len(items))
            self.waiting.setdefault(owner, deque()).append(question)
            self._bytes[owner] += question.item_bytes * len(items)

    def is_full(self, owner: str) -> bool:
        return self._bytes[owner] > PACED_MAX_BYTES

    def ask(self, builder: TurnBuilder) -> None:
        """Add the next items of every owner to the turn."""
        for owner, questions in list(self.waiting.items()):
            room = PACED_PER_TURN
            while questions and room:
                question = questions[0]
                part = question.items[question.asked : question.asked + room]
                builder.ask(question.verb, part, question.answered, size_bytes=question.item_bytes * len(part))
                question.asked += len(part)
                room -= len(part)
                self._bytes[owner] -= question.item_bytes * len(part)
                if question.asked == len(question.items):
                    questions.popleft()
            if not questions:
                del self.waiting[owner], self._bytes[owner]
