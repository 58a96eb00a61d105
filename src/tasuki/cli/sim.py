"""`tasuki sim`: runs one seed of the simulator in detail, or many seeds on all cores.

The simulator is `tasuki.testing.sim`; docs/simulator.md explains its output.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from tasuki.cli.command import PATH, command, flag, number, option, several
from tasuki.cli.output import ExitCode, Output
from tasuki.errors import InvalidInput
from tasuki.testing.sim import cases
from tasuki.testing.sim.cases import Case, CaseFailure, Narrative, Shrunk, Tried, short
from tasuki.testing.sim.faults import KINDS
from tasuki.testing.sim.history import AnyLine, write
from tasuki.testing.sim.seed_runner import SeedRunner, Summary, options_for, run_seeds
from tasuki.testing.sim.world import SimOptions

STORES = ("memory", "sqlite", "mixed")
SQLITE_EVERY = 10  # of mixed seeds


@command(
    "sim",
    examples=[
        "tasuki sim --seeds 2000                    # on all cores; lists what failed, with the command that repeats it",
        "tasuki sim --seeds 500 --from 2001 --store mixed --json",
        "tasuki sim --seed 7                        # once more, the same to the last event",
        "tasuki sim --seed 7 --trace | less         # who did what when; the last lines before a violation are marked",
        "tasuki sim --seed 7 --shrink --save 7.json # the least of it that fails alike",
        "tasuki sim --case 7.json --trace",
        "tasuki sim --seed 7 --set servers=1 --set kinds=crash,pause",
    ],
)
@number("--seed", metavar="N", type=int, help="Run this one.")
@option("--case", metavar="FILE", type=PATH, help="Run a case that --save has kept.")
@flag("--trace", help="Print everything that happens.")
@flag("--shrink", help="Look for the least of it that fails alike.")
@option("--history", metavar="FILE", type=PATH, help="Keep what the checker saw, as JSONL.")
@option("--save", metavar="FILE", type=PATH, help="Keep the case (after --shrink) for --case.")
@number("--seeds", metavar="N", type=click.IntRange(min=1), help="Run so many that count.")
@option("--from", "from_", metavar="N", type=click.IntRange(min=0), default=1, help="The first of them.")
@number("--processes", metavar="P", type=click.IntRange(min=1), help="Default: one per core.")
@flag("--cover", help="Fail also if a kind of fault or a rare branch never came.")
@option("--store", metavar="STORE", default="memory", help="memory, sqlite, or mixed: every tenth seed on SQLite.")
@several("--set", "set_", metavar="NAME=VALUE", help="An option of the world that the seed would choose. Several times.")
@option("--without", metavar="SAFEGUARD", default="", help="Switch a safeguard off, to see what the checker finds.")
def sim(
    output: Output,
    seed: int | None,
    case: Path | None,
    trace: bool,
    shrink: bool,
    history: Path | None,
    save: Path | None,
    seeds: int | None,
    from_: int,
    processes: int | None,
    cover: bool,
    store: str,
    set_: tuple[str, ...],
    without: str,
) -> int:
    if [seed is None, seeds is None, case is None].count(False) != 1:
        raise InvalidInput("give --seed N for one seed, --seeds N for many, or --case FILE for a saved one")
    chosen = _options(store, set_, without)
    if seeds is not None:
        if trace or shrink or history or save:
            raise InvalidInput("--trace, --shrink, --history and --save are for one seed: use --seed or --case")
        every = SQLITE_EVERY if store == "mixed" else 0
        wanted = SeedRunner(first=from_, count=seeds, options=chosen, sqlite_every=every, without=without, cover=cover)
        return _many(wanted, processes, output)
    found = _case(seed, case, chosen, mixed=store == "mixed")
    with cases.switched_off(without):
        return _one(found, output, trace=trace, history=history, shrink=shrink, save=save)


# ---------------------------------------------------------------------------------------------------- what to run


def _options(store: str, settings: tuple[str, ...], without: str) -> SimOptions:

    if store not in STORES:
        raise InvalidInput(f"--store must be {', '.join(STORES[:-1])} or {STORES[-1]}, got {store}")
    # A safeguard that is off is likely to be missed only in a world that was made for it.
    values: dict[str, Any] = msgspec.structs.asdict(cases.ablation(without).options) if without else {}
    values["store"] = "memory" if store == "mixed" else store
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name == "store" or name not in SimOptions.__struct_fields__:
            names = ", ".join(field for field in SimOptions.__struct_fields__ if field != "store")
            raise InvalidInput(f"--set takes NAME=VALUE with one of {names}; got {setting}")
        values[name] = tuple(value.split(",")) if name == "kinds" else value
    try:
        chosen = msgspec.convert(values, SimOptions, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"--set: {error}") from None
    if unknown := [kind for kind in chosen.kinds or () if kind not in KINDS]:
        raise InvalidInput(f"no such kind of fault: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return chosen


def _case(seed: int | None, saved: Path | None, chosen: SimOptions, *, mixed: bool) -> Case:
    if seed is not None:
        return cases.case_of(seed, options_for(seed, chosen, SQLITE_EVERY if mixed else 0))
    assert saved is not None
    try:
        return Case.decode(saved.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read {saved}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------- one


def _one(case: Case, output: Output, *, trace: bool, history: Path | None, shrink: bool, save: Path | None) -> int:
    """Run a case, show it, and shrink it if that is wanted."""
    story = Narrative(events=trace)
    lines: list[AnyLine] = []

    def observe(line: AnyLine) -> None:
        story.observe(line)
        if history is not None:
            lines.append(line)

    tried = cases.try_case(case, observe, trace=story.trace if trace else None)
    if history is not None:
        file = io.BytesIO()
        write(lines, file)
        _write(history, file.getvalue())
    shrunk = _shrunk(case, tried.failure, output) if shrink and tried.failure is not None else None
    if save is not None:
        _write(save, (shrunk.case if shrunk is not None else case).encode())
    data: dict[str, Any] = {
        "ok": tried.failure is None,
        "case": {"seed": case.seed, "options": case.options},
        "outcome": tried.outcome,
        "failure": tried.failure,
    }
    if trace:
        data["trace"] = list(story.lines(tried.failure))
    if shrunk is not None:
        data["shrunk"] = {"case": shrunk.case, "runs": shrunk.runs, "is_minimal": shrunk.is_minimal}
    output.show(data, lambda: _human(case, tried, shrunk, story, data.get("trace")))
    if shrink and tried.failure is None:
        output.hint("nothing failed: there is nothing to make smaller")
    return ExitCode.FAILED if tried.failure is not None else ExitCode.OK


def _shrunk(case: Case, failure: CaseFailure, output: Output) -> Shrunk:
    still_fails, runs = cases.same_failure(case, failure.what), 0

    def counted(options: Any, plan: Any) -> CaseFailure | None:
        nonlocal runs
        runs += 1
        left = f"{len(plan.faults)} faults and {len(plan.operations)} operations"
        output.progress(f"looking for less: run {runs}, with {left}")
        return still_fails(options, plan)

    return cases.shrink(case.seed, case.options, case.plan, counted)


def _human(case: Case, tried: Tried, shrunk: Shrunk | None, story: Narrative, trace: list[str] | None) -> Iterator[str]:
    outcome, failure = tried.outcome, tried.failure
    if trace is not None:
        yield from (*trace, "")
    if failure is not None:
        yield from (*story.of_the_job(failure), "")
    if failure is not None and failure.details:
        yield from (*failure.details.splitlines(), "")
    if shrunk is not None:
        yield from (*map(short, shrunk.lines()), "")
    yield f"options: {case.options.text()}"
    if outcome is not None:
        few = "" if outcome.counts or failure is not None else " (too quiet to count)"
        yield (
            f"seed {case.seed}: {outcome.verbs.total()} store verbs, {outcome.faults.total()} faults, "
            f"{outcome.events:,} events, {outcome.virtual_s:.0f} s of virtual time{few}, trace {outcome.trace_hash}"
        )
    yield f"FAILED: {short(str(failure))}" if failure is not None else "no violation"


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------- many


def _many(wanted: SeedRunner, processes: int | None, output: Output) -> int:
    def heard(summary: Summary) -> None:
        left = wanted.count - summary.counted - len(summary.failures)
        to_go_s = left * summary.wall_s / summary.seeds
        failed = f", {len(summary.failures)} FAILED" if summary.failures else ""
        output.progress(f"{summary.seeds} of {wanted.count} seeds{failed}, {to_go_s:.0f} s to go")

    summary = run_seeds(wanted, processes=processes, heard=heard)
    lacking = summary.lacking if wanted.cover else []
    failures = [{"seed": ran.order.seed, "failure": ran.failure, "repeat": ran.order.command} for ran in summary.failures]
    found = {"ok": summary.good and not lacking, "failures": failures, "lacking": lacking}

    def human() -> Iterator[str]:
        yield from summary.lines_of_numbers()
        yield from summary.lines_of_failures()
        if summary.too_little:
            yield f"too quiet to count: seeds {', '.join(map(str, sorted(summary.too_little)[:20]))}"
        if lacking:
            yield f"FAILED: not covered: {', '.join(lacking)}"
        yield summary.verdict()

    output.show(msgspec.structs.asdict(summary) | found, human)
    if summary.is_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if summary.good and not lacking else ExitCode.FAILED
