"""`tasuki sim`: runs one seed of the simulator in detail, or many seeds on all cores.

The simulator is `tasuki.testing.sim`; docs/simulator.md explains its output.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tasuki.cli.command import PATH, command, flag, number, option, several
from tasuki.cli.output import ExitCode, Output
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.testing.sim.cases import Case, CaseFailure, Shrunk, Tried
    from tasuki.testing.sim.history import AnyLine
    from tasuki.testing.sim.seed_runner import SeedRunner, Summary
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
@flag("--trace", help="Tell everything that happens.")
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
    from tasuki.testing.sim.cases import switched_off
    from tasuki.testing.sim.seed_runner import SeedRunner

    if [seed is None, seeds is None, case is None].count(False) != 1:
        raise InvalidInput("give --seed N for one seed, --seeds N for many, or --case FILE for a saved one")
    chosen = _options(store, set_, without)
    if seeds is not None:
        if trace or shrink or history or save:
            raise InvalidInput("--trace, --shrink, --history and --save are for one seed: use --seed or --case")
        every = SQLITE_EVERY if store == "mixed" else 0
        wanted = SeedRunner(first=from_, count=seeds, options=chosen, sqlite_every=every, without=without, cover=cover)
        return _many(wanted, processes, output)
    one = _One(_case(seed, case, chosen, mixed=store == "mixed"), output, trace=trace)
    with switched_off(without):
        return one.run(history, shrink=shrink, save=save)


# ---------------------------------------------------------------------------------------------------- what to run


def _options(store: str, settings: tuple[str, ...], without: str) -> SimOptions:
    import msgspec

    from tasuki.testing.sim.faults import KINDS
    from tasuki.testing.sim.world import SimOptions

    if store not in STORES:
        raise InvalidInput(f"--store must be {', '.join(STORES[:-1])} or {STORES[-1]}, got {store}")
    values: dict[str, Any] = _made_for(without) | {"store": "memory" if store == "mixed" else store}
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


def _made_for(without: str) -> dict[str, Any]:
    """Return options with which the safeguard is likely to be needed."""
    if not without:
        return {}
    import msgspec

    from tasuki.testing.sim.cases import ablation

    return msgspec.structs.asdict(ablation(without).options)


def _case(seed: int | None, saved: Path | None, chosen: SimOptions, *, mixed: bool) -> Case:
    from tasuki.testing.sim.cases import Case, case_of
    from tasuki.testing.sim.seed_runner import options_for

    if seed is not None:
        return case_of(seed, options_for(seed, chosen, SQLITE_EVERY if mixed else 0))
    assert saved is not None
    try:
        return Case.decode(saved.read_bytes())
    except OSError as error:
        raise InvalidInput(f"cannot read {saved}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------- one


class _One:
    """One case: run, shown, and shrunk if that is wanted."""

    def __init__(self, case: Case, output: Output, *, trace: bool) -> None:
        from tasuki.testing.sim.cases import Narrative

        self.case = case
        self.output = output
        self.with_trace = trace
        self.story = Narrative(events=trace)
        self.lines: list[AnyLine] = []

    def run(self, history: Path | None, *, shrink: bool, save: Path | None) -> int:
        tried = self._try(keep=history is not None)
        if history is not None:
            self._write_history(history)
        shrunk = self._shrink(tried.failure) if shrink and tried.failure is not None else None
        if save is not None:
            _write(save, (shrunk.case if shrunk is not None else self.case).encode())
        self.output.show(self._data(tried, shrunk), lambda: self._human(tried, shrunk))
        if shrink and tried.failure is None:
            self.output.hint("nothing failed: there is nothing to make smaller")
        return ExitCode.FAILED if tried.failure is not None else ExitCode.OK

    def _try(self, *, keep: bool) -> Tried:
        from tasuki.testing.sim.cases import try_case

        def observe(line: AnyLine) -> None:
            self.story.observe(line)
            if keep:
                self.lines.append(line)

        return try_case(self.case, observe, trace=self.story.trace if self.with_trace else None)

    def _write_history(self, path: Path) -> None:
        import io

        from tasuki.testing.sim.history import write

        file = io.BytesIO()
        write(self.lines, file)
        _write(path, file.getvalue())

    def _shrink(self, failure: CaseFailure) -> Shrunk:
        from tasuki.testing.sim.cases import same_failure, shrink

        still_fails, runs = same_failure(self.case, failure.what), 0

        def counted(options: Any, plan: Any) -> CaseFailure | None:
            nonlocal runs
            runs += 1
            left = f"{len(plan.faults)} faults and {len(plan.operations)} operations"
            self.output.progress(f"looking for less: run {runs}, with {left}")
            return still_fails(options, plan)

        return shrink(self.case.seed, self.case.options, self.case.plan, counted)

    # -- shown ------------------------------------------------------------------------------------------------------
    def _human(self, tried: Tried, shrunk: Shrunk | None) -> list[str]:
        from tasuki.testing.sim.cases import short

        failure, lines = tried.failure, []
        if self.with_trace:
            lines += [*self.story.lines(failure), ""]
        if failure is not None:
            lines += [*self.story.of_the_job(failure), ""]
        if failure is not None and failure.details:
            lines += [*failure.details.splitlines(), ""]
        if shrunk is not None:
            lines += [*map(short, shrunk.lines()), ""]
        return [*lines, *self._closing(tried)]

    def _closing(self, tried: Tried) -> list[str]:
        from tasuki.testing.sim.cases import short

        outcome, failure = tried.outcome, tried.failure
        lines = [f"options: {self.case.options.text()}"]
        if outcome is not None:
            few = "" if outcome.counts or failure is not None else " (too quiet to count)"
            lines.append(
                f"seed {self.case.seed}: {outcome.verbs.total()} store verbs, {outcome.faults.total()} faults, "
                f"{outcome.events:,} events, {outcome.virtual_s:.0f} s of virtual time{few}, trace {outcome.trace_hash}"
            )
        lines.append(f"FAILED: {short(str(failure))}" if failure is not None else "no violation")
        return lines

    def _data(self, tried: Tried, shrunk: Shrunk | None) -> dict[str, Any]:
        data = {
            "ok": tried.failure is None,
            "case": {"seed": self.case.seed, "options": self.case.options},
            "outcome": tried.outcome,
            "failure": tried.failure,
        }
        if self.with_trace:
            data["trace"] = list(self.story.lines(tried.failure))
        if shrunk is not None:
            data["shrunk"] = {"case": shrunk.case, "runs": shrunk.runs, "is_minimal": shrunk.is_minimal}
        return data


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------- many


def _many(wanted: SeedRunner, processes: int | None, output: Output) -> int:
    from tasuki.testing.sim.seed_runner import run_seeds

    def heard(summary: Summary) -> None:
        left = wanted.count - summary.counted - len(summary.failures)
        to_go_s = left * summary.wall_s / summary.seeds
        failed = f", {len(summary.failures)} FAILED" if summary.failures else ""
        output.progress(f"{summary.seeds} of {wanted.count} seeds{failed}, {to_go_s:.0f} s to go")

    summary = run_seeds(wanted, processes=processes, heard=heard)
    lacking = summary.lacking if wanted.cover else []
    output.show(_many_data(summary, lacking), lambda: _many_lines(summary, lacking))
    if summary.is_interrupted:
        return ExitCode.INTERRUPTED
    return ExitCode.OK if summary.good and not lacking else ExitCode.FAILED


def _many_lines(summary: Summary, lacking: list[str]) -> list[str]:
    lines = [*summary.lines_of_numbers(), *summary.lines_of_failures()]
    if summary.too_little:
        lines.append(f"too quiet to count: seeds {', '.join(map(str, sorted(summary.too_little)[:20]))}")
    if lacking:
        lines.append(f"FAILED: not covered: {', '.join(lacking)}")
    return [*lines, summary.verdict()]


def _many_data(summary: Summary, lacking: list[str]) -> dict[str, Any]:
    import msgspec

    failures = [{"seed": ran.order.seed, "failure": ran.failure, "repeat": ran.order.command} for ran in summary.failures]
    return {**msgspec.structs.asdict(summary), "ok": summary.good and not lacking, "failures": failures, "lacking": lacking}
