"""A plan at a table: the test plays the nodes, and turns the clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

from tasuki.core.failover.events import (
    Ask,
    Begin,
    CheckNode,
    Command,
    Event,
    FailoverJob,
    Fetch,
    Finish,
    GiveUp,
    JobEnded,
    JobStatusMissing,
    JobStatusReceived,
    NodeJobStatus,
    Post,
    Refusal,
    Refused,
    RequestLost,
    Saved,
    TimePassed,
)
from tasuki.core.failover.nodes import Capacity, Nodes
from tasuki.core.failover.plan import FailoverPlan
from tasuki.errors import TasukiError

A, B, C = "http://a:7090", "http://b:7090", "http://c:7090"
INPUT = "1" * 64
T = TypeVar("T", bound=Command)


class Table:
    """`frozen` nodes never answer a look, `dead` ones refuse it, `refusing` ones our token; the others are well.

    The first of `names` is the best.
    """

    def __init__(self, names: Sequence[str] = (A, B, C), **job: Any) -> None:
        self.nodes = Nodes(names, itertools.count().__next__)
        self.plan = FailoverPlan(FailoverJob("7f3c", INPUT, **job), self.nodes)
        self.now = 1000.0
        self.said: list[Command] = []
        self.frozen: set[str] = set()
        self.dead: set[str] = set()
        self.refusing: set[str] = set()
        self.capacity = {name: Capacity(0, 4) for name in names}

    def begin(self) -> Table:
        return self.hear(Begin())

    def hear(self, event: Event) -> Table:
        commands = self.plan.apply(event, self.now)
        self.said += commands
        for command in commands:
            if isinstance(command, CheckNode):
                self._look(command.node)
        return self

    def _look(self, node: str) -> None:
        if node in self.frozen:
            return
        if node in self.dead:
            self.nodes.unwell(node, "connection refused", self.now)
        elif node in self.refusing:
            self.nodes.refused(node, Refusal(401, "UNAUTHORIZED"), self.now)
        else:
            self.nodes.seen(node, self.capacity[node], self.now)
        self.hear(TimePassed())

    def frozen_looks_time_out(self) -> Table:
        for node in self.frozen:
            self.nodes.unwell(node, "did not answer within 2 s", self.now)
        return self.hear(TimePassed())

    def later(self, seconds: float) -> Table:
        """Let time pass as a driver does: with a tick whenever one is due."""
        end = self.now + seconds
        while not self.plan.over and self.now < end and (due_at := self.plan.due_at(self.now)) < end:
            self.now = min(end, max(self.now + 1e-3, due_at))
            self.hear(TimePassed())
        self.now = end
        return self.hear(TimePassed())

    # ------------------------------------------------------------------------------------------------ what was said

    def all(self, kind: type[T]) -> list[T]:
        return [command for command in self.said if isinstance(command, kind)]

    @property
    def posted(self) -> list[str]:
        return [command.node for command in self.all(Post)]

    @property
    def last(self) -> Post | Fetch:
        return next(command for command in reversed(self.said) if isinstance(command, Post | Fetch))

    @property
    def finish(self) -> Finish:
        (finish,) = self.all(Finish)
        return finish

    @property
    def error(self) -> TasukiError:
        (given_up,) = self.all(GiveUp)
        return given_up.error

    # ------------------------------------------------------------------------------------------------ what nodes do

    def lost(self, reason: str = "the connection was lost", ticket: int | None = None) -> Table:
        return self.hear(RequestLost(ticket or self.last.ticket, reason))

    def refused(self, status: int, code: str = "", **more: Any) -> Table:
        return self.hear(Refused(self.last.ticket, Refusal(status, code, **more)))

    def saved(self, ticket: int | None = None) -> Table:
        return self.hear(Saved(ticket or self.last.ticket, JobEnded("succeeded", 0)))

    def told(self, node: str, state: str | None, input: str = INPUT, exit_code: int | None = None) -> Table:
        """The answer to the last question to this node."""
        ask = [command for command in self.all(Ask) if command.node == node][-1]
        return self.hear(JobStatusReceived(ask.ticket, NodeJobStatus(state, input, exit_code) if state else None))

    def untold(self, node: str, *, gone: bool) -> Table:
        ask = [command for command in self.all(Ask) if command.node == node][-1]
        return self.hear(JobStatusMissing(ask.ticket, "connection refused" if gone else "no answer", gone))
