"""`tasuki sim`: one seed of the simulator from close up, or many of them on all cores.

Everything happens in `tasuki.testing.sim`; here it is asked for and shown. docs/simulator.md says how to read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command
from tasuki.cli.output import Output
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.testing.sim.cases import Case, CaseFailure, Shrunk, Tried
    from tasuki.testing.sim.history import AnyLine
    from tasuki.testing.sim.seed_runner import SeedRunner, Summary
    from tasuki.testing.sim.world import SimOptions

STORES = ("memory", "sqlite", "mixed")
SQLITE_EVERY = 10  # of mixed seeds


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
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
    )(sim)


def sim(
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Run this one.")] = None,
    case: Annotated[Path | None, typer.Option("--case", metavar="FILE", help="Run a case that --save has kept.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Tell everything that happens.")] = False,
    shrink: Annotated[bool, typer.Option("--shrink", help="Look for the least of it that fails alike.")] = False,
    history: Annotated[
        Path | None, typer.Option("--history", metavar="FILE", help="Keep what the checker saw, as JSONL.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Keep the case (after --shrink) for --case.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", metavar="N", min=1, help="Run so many that count.")] = None,
    from_: Annotated[int, typer.Option("--from", metavar="N", min=0, help="The first of them.")] = 1,
    processes: Annotated[int | None, typer.Option("--processes", metavar="P", min=1, help="Default: one per core.")] = None,
    cover: Annotated[bool, typer.Option("--cover", help="Fail also if a kind of fault or a rare branch never came.")] = False,
    store: Annotated[
        str, typer.Option("--store", metavar="STORE", help="memory, sqlite, or mixed: every tenth seed on SQLite.")
    ] = "memory",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An option of the world that the seed would choose. Several times."),
    ] = None,
    without: Annotated[
        str, typer.Option("--without", metavar="SAFEGUARD", help="Switch a safeguard off, to see what the checker finds.")
    ] = "",
    json: options.Json = False,
) -> int:
    """Whole systems under faults, simulated and judged."""
    from tasuki.testing.sim.cases import switched_off
    from tasuki.testing.sim.seed_runner import SeedRunner

    if [seed is None, seeds is None, case is None].count(False) != 1:
        raise InvalidInput("give --seed N for one seed, --seeds N for many, or --case FILE for a saved one")
    chosen = _options(store, set_ or [], without)
    output = Output(json=json)
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


def _options(store: str, settings: list[str], without: str) -> SimOptions:
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
    """What makes it likely that the safeguard is needed."""
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
    """One case: run, told, and made smaller if that is wanted."""

    def __init__(self, case: Case, output: Output, *, trace: bool) -> None:
        from tasuki.testing.sim.cases import Story

        self.case = case
        self.output = output
        self.with_trace = trace
        self.story = Story(events=trace)
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
        return exit_codes.FAILED if tried.failure is not None else exit_codes.OK

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
        return exit_codes.INTERRUPTED
    return exit_codes.OK if summary.good and not lacking else exit_codes.FAILED


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
