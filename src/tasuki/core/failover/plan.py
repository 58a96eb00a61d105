"""Plan of one job over several nodes: `apply(event, now) -> commands`. Pure.

Theory of operation. The job has one id wherever it is sent, so a second run is harmless; the plan still avoids it. If the caller
chose the id, all nodes are first asked for the job: a stored result is fetched, a run that is under way is followed (polled).
Otherwise the job is posted to the first node of the ranking, and the response is its result.

A request that is lost, or answered without an outcome, goes to the next node at once. While a request waits, its node is asked
for the status of the job: that gives the progress, and a node that is silent for `silent_s` (frozen, unplugged) is treated like
one that hung up. A program's failure is an outcome, and final. A time limit is an outcome that another node may improve. 423
means that the job runs there; it is followed. Full nodes are waited for, with growing pauses, whatever their breakers say. A node
that cannot run this very job (it lacks the program, the space or the token) is not tried again for it, and keeps its rank for
other jobs. With `hedge_s`, a job without an answer after that time goes to a second node as well. The first result wins, and
every other run is canceled; a job that has ended is not removed, as it may be the same result seen through another dispatcher.

A dispatcher is a node like any other. If it redirects to a node that fails, the dispatcher is asked again and not blamed.

When no node is well, nodes that are left out are checked more often: one with enough good checks in a row is used before its time
is over. If none is found for `patience_s`, the caller gets the last answer of each node.

The driver checks nodes and records the answers in `Nodes`, which all plans of a client share; then it sends TimePassed to each
plan.
"""

from __future__ import annotations

from tasuki.core.failover import events
from tasuki.core.failover.events import Command, JobEnded, NodeRequest, Refusal, RefusalMeaning, RequestKind
from tasuki.core.failover.nodes import RANK_WAIT_S, Nodes, NodeState, Ranked
from tasuki.errors import Conflict, DeadlineExceeded, TasukiError, Unavailable

ASK_WAIT_S = 2.0  # for the answers of nodes that may have the job; as long as one question may take
WATCH_S = 1.0  # between two questions to a node that works on the job
FOLLOW_MAX_S = 2.0  # the longest pause between two questions; FOLLOW_FIRST_S is the first
LOOK_AGAIN_S = 0.25  # while no node is well
LOOK_FULL_S = 0.5  # while all healthy nodes are full
REFRESH_S = 5.0  # during a run: the next node should be known when it is needed
FULL_PAUSE_MAX_S = 2.0  # the longest first pause that a full node may ask for
LED_PAUSE_S = 0.5  # longer each time a dispatcher redirects to a node that fails; most deaths it notices by itself
UNKNOWN_PAUSE_S = 1.0  # after a node reported "running", and then did not know the job
PAUSE_MAX_S = 4.0  # of pauses that double from the first one
TRIES_MAX = 5  # of one node, without an outcome: bounds the uploads to a healthy node that never answers
ODD_MAX = 3  # answers in a row that do not fit a waiting request: its connection is dead


class FailoverPlan:
    """Plan of one job. `over` once Finish or GiveUp was returned."""

    def __init__(self, job: events.FailoverJob, nodes: Nodes) -> None:
        self.over = False
        self._job = job
        self._nodes = nodes
        self._ticket = 0
        self._began = 0.0
        self._asked: dict[int, str] = {}
        """Nodes that were asked for the job and have not answered, by ticket."""
        self._found: dict[str, events.NodeJobStatus] = {}
        self._looks_until = self._asks_until = 0.0
        self._choosing = False
        self._runs: dict[int, NodeRequest] = {}
        self._answers: dict[str, str] = {}
        """Last answer of each node to this plan."""
        self._tries: dict[str, int] = {}
        self._done_with: set[str] = set()
        self._not_here: dict[str, Refusal] = {}
        self._paused_until: dict[str, float] = {}
        self._pauses: dict[str, int] = {}
        """Number of pauses of each node."""
        self._notes: dict[str, str] = {}
        """Last note of each node that would be repeated; "" is that all of them are full."""
        self._posted_to = ""
        self._left: set[str] = set()
        """Nodes that may still run the job, though the plan turned to others."""
        self._late: tuple[str, JobEnded] | None = None
        """The node that last exceeded its time limit."""
        self._verdict: TasukiError | None = None
        self._hopeless_since: float | None = None
        self._looked_at = -REFRESH_S

    def apply(self, event: events.Event, now: float) -> list[Command]:
        if self.over:
            return []
        commands = self._handle(event, now)
        return commands if self.over else [*commands, *self._go_on(now)]

    def _handle(self, event: events.Event, now: float) -> list[Command]:
        match event:
            case events.Begin():
                return self._begin(now)
            case events.JobStatusReceived() | events.JobStatusMissing():
                return self._first_answer(event) if event.ticket in self._asked else self._asked_again(event, now)
            case events.TimePassed():
                return []
            case _:
                run = self._runs.get(event.ticket)
                return [] if run is None else self._handle_request(run, event, now)

    def _handle_request(self, run: NodeRequest, event: events.RequestEvent, now: float) -> list[Command]:
        run.heard_at = now
        match event:
            case events.Redirected():
                run.led_to = event.to
            case events.Uploaded():
                run.uploaded = True
            case events.ResultPieceReceived():
                run.answering = True
            case events.Saved():
                self._nodes.answered(run.node, now)
                del self._runs[run.ticket]
                return self._finish(run.node, run.ended or event.ended, run.ticket)
            case events.Refused():
                return self._refused(run, event.refusal, now)
            case events.RequestLost():
                return self._lost(run, event.reason, now)
        return []

    # ------------------------------------------------------------------------------------------------ the first look

    def _begin(self, now: float) -> list[Command]:
        self._began = now
        self._choosing, self._looks_until = True, now + RANK_WAIT_S
        return self._ask_all(now) if self._job.known else []

    def _ask_all(self, now: float) -> list[Command]:
        """Ask all nodes for this job."""
        self._choosing, self._looks_until, self._asks_until = True, now + RANK_WAIT_S, now + ASK_WAIT_S
        asked = {self._new_ticket(): node for node in self._nodes.names}
        self._asked.update(asked)
        return [events.Ask(ticket, node) for ticket, node in asked.items()]

    def _first_answer(self, event: events.JobReport) -> list[Command]:
        node = self._asked.pop(event.ticket)
        if isinstance(event, events.JobStatusReceived) and event.status is not None:
            self._found[node] = event.status
        return []

    def _still_choosing(self, now: float) -> bool:
        """Return whether to wait for nodes that have not answered yet."""
        if self._choosing:
            states = {status.state for status in self._found.values()}
            soon = now < self._looks_until and (bool(self._asked) or self._nodes.looking)
            later = "running" not in states and now < self._asks_until and self._may_still_say(now)
            self._choosing = "done" not in states and (soon or later)
        return self._choosing

    def _may_still_say(self, now: float) -> bool:
        """Return whether a node that was asked, and is not left out, has not answered."""
        left_out = {line.node for line in self._nodes.ranking(now) if line.standing is NodeState.LEFT_OUT}
        return not left_out.issuperset(self._asked.values())

    def _take_up(self, now: float) -> list[Command]:
        """Use what a node already has: its result, else its run. A failed or interrupted job is run again.

        When the job is under way already, only a result is of use; a second run is stopped in the end.
        """
        found, self._found = self._found, {}
        theirs = {node: status for node, status in found.items() if status.state in ("done", "running")}
        others = (
            {node for node, status in theirs.items() if status.input not in ("", self._job.input)} if self._job.input else set()
        )
        if others and not self._runs:
            return self._give_up(Conflict(self._job.job_id, ("input",)))
        busy = others | {run.node for run in self._runs.values()}
        self._left |= {node for node, status in theirs.items() if self._runs and status.state == "running" and node not in busy}
        kinds = (("done", RequestKind.FETCH),) if self._runs else (("done", RequestKind.FETCH), ("running", RequestKind.FOLLOW))
        for state, kind in kinds:
            node = next((node for node, status in theirs.items() if status.state == state and node not in busy), None)
            if node is not None:
                word = "has the result" if state == "done" else "runs it already"
                return [events.Notify(f"{node} {word}"), *self._start(node, kind, now)]
        return []

    # ------------------------------------------------------------------------------------------------ runs

    def _new_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def _start(self, node: str, kind: RequestKind, now: float, ended: JobEnded | None = None) -> list[Command]:
        ask_in_s = events.FOLLOW_FIRST_S if kind is RequestKind.FOLLOW else WATCH_S
        run = NodeRequest(self._new_ticket(), node, kind, now, now, now + ask_in_s, ended=ended)
        self._runs[run.ticket] = run
        self._hopeless_since = None
        if kind is RequestKind.POST:
            self._nodes.taken(node)
            return [events.Post(run.ticket, node)]
        return [events.Fetch(run.ticket, node)] if kind is RequestKind.FETCH else []

    def _finish(self, node: str, ended: JobEnded, ticket: int | None) -> list[Command]:
        self.over = True
        others = [run for run in self._runs.values() if run.node != node]
        elsewhere = {run.node for run in others if run.kind is not RequestKind.FETCH} | self._left
        return [
            *(events.Drop(run.ticket) for run in self._runs.values()),
            *(events.Remove(other) for other in self._nodes.names if other in elsewhere and other != node),
            events.Finish(node, ended, ticket),
        ]

    def _refused(self, run: NodeRequest, refusal: Refusal, now: float) -> list[Command]:
        self._answers[run.node] = refusal.words() if not run.led_to else f"{run.led_to} {refusal.words()}"
        if run.kind is RequestKind.FETCH and run.ended is not None:
            return self._without_result(run)
        meaning = events.meaning_of(refusal)
        is_gone = refusal.status == 404 and run.kind is not RequestKind.POST  # it was removed meanwhile; the node is well
        if meaning is RefusalMeaning.FAILED and not is_gone:
            return self._lost(run, refusal.words(), now)
        del self._runs[run.ticket]
        if is_gone:
            self._pause(run.node, 0.0, now)
        match meaning:
            case RefusalMeaning.RUNNING:
                words = f"{run.where}: the job runs there already"
                return [events.Notify(words), *self._start(run.node, RequestKind.FOLLOW, now)]
            case RefusalMeaning.FULL:
                pause_s = min(FULL_PAUSE_MAX_S, max(LOOK_AGAIN_S, refusal.retry_after_s or 0.0))
                self._pause(run.node, LED_PAUSE_S if run.led_to else pause_s, now)
                if not run.led_to:
                    self._nodes.full(run.node, refusal.words(), pause_s, now)
                return self._note_once(run.node, events.about(run.where, refusal.words()))
            case RefusalMeaning.TIMED_OUT:
                ended = JobEnded("timed_out", refusal.exit_code, refusal.error_code or "TIMED_OUT", refusal.message)
                return self._timed_out(run, ended, now)
            case RefusalMeaning.PROGRAM_FAILED:
                self._nodes.answered(run.node, now)
                ended = JobEnded("failed", refusal.exit_code, refusal.error_code or "EXIT_CODE", refusal.message)
                return self._start(run.node, RequestKind.FETCH, now, ended)
            case RefusalMeaning.CANCELED:  # perhaps by another client of this job, which got the result from another node
                self._verdict = events.error_of(refusal, self._job.job_id, f"{run.where} {refusal.words()}")
                return [] if self._runs else self._ask_all(now)
            case RefusalMeaning.NOT_HERE:
                if refusal.status:
                    self._nodes.answered(run.node, now)
                self._done_with.add(run.node)
                self._not_here[run.node] = refusal
                return [events.Notify(events.about(run.where, refusal.words()))]
            case RefusalMeaning.FINAL:  # unless the job runs at another node, whose answer then counts
                self._nodes.answered(run.node, now)
                self._done_with.add(run.node)
                self._verdict = events.error_of(refusal, self._job.job_id, f"{run.where} {refusal.words()}")
                return [] if self._runs else self._give_up(self._verdict)
        return []

    def _pause(self, node: str, first_s: float, now: float) -> None:
        """Do not send the job to a node for a while, each time longer; with `first_s` 0 from the second time on. So neither a
        full node nor one that contradicts itself is sent upload after upload."""
        count = self._pauses[node] = self._pauses.get(node, 0) + 1
        base_s = first_s or (LOOK_AGAIN_S if count > 1 else 0.0)
        self._paused_until[node] = now + min(PAUSE_MAX_S, base_s * 2.0 ** min(count - 1, 10))

    def _note_once(self, node: str, text: str) -> list[Command]:
        if self._notes.get(node) == text:
            return []
        self._notes[node] = text
        return [events.Notify(text)]

    def _timed_out(self, run: NodeRequest, ended: JobEnded, now: float) -> list[Command]:
        self._nodes.answered(run.node, now)
        self._done_with.add(run.node)
        self._answers.setdefault(run.node, "the job passed its time limit there")
        self._late = (run.node, ended)
        return [events.Notify(f"{run.node}: the job passed its time limit there")]

    def _lost(self, run: NodeRequest, reason: str, now: float) -> list[Command]:
        """Record a request without an outcome. The next node is chosen right after."""
        self._answers[run.node] = events.about(run.where, reason) if run.led_to else reason
        if not run.led_to:
            self._nodes.failed(run.node, reason, now)
        if run.kind is RequestKind.FETCH and run.ended is not None:
            return self._without_result(run)
        del self._runs[run.ticket]
        if run.kind is not RequestKind.FETCH:
            self._left.add(run.node)
        tries = self._tries[run.node] = self._tries.get(run.node, 0) + 1
        if tries >= TRIES_MAX:
            self._done_with.add(run.node)
        if run.led_to:
            self._paused_until[run.node] = now + (tries - 1) * LED_PAUSE_S
        return [events.Notify(events.about(run.where, reason))]

    def _without_result(self, run: NodeRequest) -> list[Command]:
        """Finish without the result, which cannot be fetched; the outcome is known."""
        assert run.ended is not None
        del self._runs[run.ticket]
        return self._finish(run.node, run.ended, None)

    # ------------------------------------------------------------------------------------------------ asking a node about the job

    def _asked_again(self, event: events.JobReport, now: float) -> list[Command]:
        run = self._runs.get(event.ticket)
        if run is None:
            return []
        run.asking = False
        if isinstance(event, events.JobStatusMissing):
            if event.alive and run.kind is RequestKind.POST and not run.led_to:
                run.heard_at = now
            gone = event.gone and run.kind is RequestKind.FOLLOW  # a request of this plan notices it by itself, and more exactly
            return self._lost(run, event.reason, now) if gone else []
        run.heard_at = now
        return self._followed(run, event.status, now) if run.kind is RequestKind.FOLLOW else self._watched(run, event.status, now)

    def _followed(self, run: NodeRequest, status: events.NodeJobStatus | None, now: float) -> list[Command]:
        state = status.state if status is not None else ""
        if state in ("running", "queued"):
            return []
        del self._runs[run.ticket]
        match state:
            case "done":
                return self._start(run.node, RequestKind.FETCH, now)
            case "failed" if status is not None:
                ended = JobEnded("failed", status.exit_code, "EXIT_CODE", "the program failed")
                return self._start(run.node, RequestKind.FETCH, now, ended)
            case "timed_out" if status is not None:
                return self._timed_out(run, JobEnded("timed_out", status.exit_code, "TIMED_OUT"), now)
        # Not known any more; else interrupted, or a state of a newer version: it may be run again.
        self._pause(run.node, UNKNOWN_PAUSE_S if status is None else 0.0, now)
        return []

    def _watched(self, run: NodeRequest, status: events.NodeJobStatus | None, now: float) -> list[Command]:
        """Drop a request on a dead connection: the node has given its answer already, or never will."""
        running = status is not None and status.state in ("running", "queued")
        fits = run.kind is not RequestKind.POST or run.answering or running or not run.uploaded
        run.odd = 0 if fits else run.odd + 1
        if run.odd < ODD_MAX:
            return []
        return [events.Drop(run.ticket), *self._lost(run, "its connection is dead: the job is not running there any more", now)]

    # ------------------------------------------------------------------------------------------------ what is to be done now

    def _go_on(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for step in (self._look, self._time_limit, self._silence, self._questions, self._advance):
            if not self.over:
                commands += step(now)
        return commands

    def _look_every_s(self) -> float:
        return REFRESH_S if self._runs else LOOK_FULL_S if self._hopeless_since is None else LOOK_AGAIN_S

    def _look(self, now: float) -> list[Command]:
        if now < self._looked_at + self._look_every_s():
            return []
        self._looked_at = now
        return [events.CheckNode(node) for node in self._nodes.to_look_at(now, self._look_every_s())]

    def _time_limit(self, now: float) -> list[Command]:
        return self._give_up(self._out_of_time()) if now >= self._began + self._job.limit_s else []

    def _advance(self, now: float) -> list[Command]:
        """Use what was found, else choose a node, or a second one if the first takes too long."""
        if self._still_choosing(now):
            return []
        if self._found:
            taken_up = self._take_up(now)
            if taken_up:
                return taken_up
        if not self._runs:
            return self._next(now)
        hedge_at = self._hedge_due_at()
        return self._hedge(now) if hedge_at is not None and now >= hedge_at else []

    def _silence(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for run in list(self._runs.values()):
            silent_s = now - run.heard_at
            if silent_s >= self._job.silent_s and not self.over:
                commands += [events.Drop(run.ticket), *self._lost(run, f"has been silent for {silent_s:.0f} s", now)]
        return commands

    def _questions(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for run in self._runs.values():
            if run.asking or run.answering or now < run.ask_at:
                continue
            if run.kind is RequestKind.FOLLOW:
                run.poll_s = min(FOLLOW_MAX_S, run.poll_s * 1.5)
            run.asking = True
            run.ask_at = now + (run.poll_s if run.kind is RequestKind.FOLLOW else WATCH_S)
            commands.append(events.Ask(run.ticket, run.node))
        return commands

    def _candidates(self, now: float) -> list[Ranked]:
        busy = {run.node for run in self._runs.values()}
        out = busy | self._done_with
        return [line for line in self._nodes.ranking(now) if line.node not in out and line.refusal is None]

    def _ready(self, line: Ranked, now: float) -> bool:
        usable = line.standing is NodeState.FREE or line.steady
        return usable and not line.full and now >= self._paused_until.get(line.node, now)

    def _next(self, now: float) -> list[Command]:
        if self._verdict is not None:
            return self._give_up(self._verdict)
        candidates = self._candidates(now)
        hope = [line for line in candidates if line.standing in (NodeState.FREE, NodeState.FULL, NodeState.UNKNOWN)]
        hope = hope or [line for line in candidates if line.steady]
        best = next((line for line in hope if self._ready(line, now)), None)
        if best is not None:
            moved = [events.Notify(f"going on at {best.node}")] if self._answers and best.node != self._posted_to else []
            self._posted_to = best.node
            return [*moved, *self._start(best.node, RequestKind.POST, now)]
        if hope:
            self._hopeless_since = None
            return self._note_once("", "all nodes are full; waiting for a free slot") if all(line.full for line in hope) else []
        if self._hopeless_since is None:
            self._hopeless_since = now
        if candidates and now < self._hopeless_since + self._job.patience_s:
            return []
        return self._last_word(now)

    def _last_word(self, now: float) -> list[Command]:
        """End the plan when no node is left. A time limit that was exceeded is an outcome, with a result to fetch."""
        if self._late is not None:
            node, ended = self._late
            return self._start(node, RequestKind.FETCH, now, ended)
        lines = {line.node: line for line in self._nodes.ranking(now)}
        answers = events.answers_in_words({node: self._answers.get(node, lines[node].last_answer) for node in self._nodes.names})
        message = f"no node could run job {self._job.job_id}: {answers}"
        refusals = [refusal for node, line in lines.items() if (refusal := self._not_here.get(node) or line.refusal)]
        if len(refusals) < len(lines):
            return self._give_up(Unavailable(message))
        return self._give_up(events.error_of(max(refusals, key=lambda refusal: refusal.status), self._job.job_id, message))

    def _hedge_due_at(self) -> float | None:
        if self._job.hedge_s is None or len(self._runs) != 1:
            return None
        (run,) = self._runs.values()
        waits = run.kind is not RequestKind.FETCH and not run.answering
        return run.began + self._job.hedge_s if waits else None

    def _hedge(self, now: float) -> list[Command]:
        free = (line for line in self._candidates(now) if line.standing is NodeState.FREE)
        best = next((line for line in free if self._ready(line, now)), None)
        if best is None:
            return []
        return [events.Notify(f"no answer yet: also at {best.node}"), *self._start(best.node, RequestKind.POST, now)]

    # ------------------------------------------------------------------------------------------------ the end

    def _out_of_time(self) -> TasukiError:
        where = ", ".join(run.node for run in self._runs.values() if run.kind is not RequestKind.FETCH)
        state = f"it may still run at {where}" if where else "no node was free in time"
        answers = events.answers_in_words(self._answers)
        return DeadlineExceeded(
            f"job {self._job.job_id} has no result after {self._job.limit_s:g} s; {state}; "
            f"call again with the same job id to wait longer{'; ' + answers if answers else ''}"
        )

    def _give_up(self, error: TasukiError) -> list[Command]:
        self.over = True
        return [*(events.Drop(run.ticket) for run in self._runs.values()), events.GiveUp(error)]

    def due_at(self, now: float) -> float:
        """Return when TimePassed must be applied at the latest."""
        times = [self._began + self._job.limit_s, self._looked_at + self._look_every_s()]
        for run in self._runs.values():
            times.append(run.heard_at + self._job.silent_s)
            if not run.asking and not run.answering:
                times.append(run.ask_at)
        if self._choosing:
            times += [until for until in (self._looks_until, self._asks_until) if until > now]
        if not self._runs:
            times += [until for until in self._paused_until.values() if until > now]
        if self._hopeless_since is not None:
            times.append(self._hopeless_since + self._job.patience_s)
        hedge_at = self._hedge_due_at()
        if hedge_at is not None and hedge_at > now:
            times.append(hedge_at)
        return min(times)
