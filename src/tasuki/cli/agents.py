"""Node agents: `tasuki run --to agents:…` runs a job on a node that is well, without a server; `tasuki nodes` lists the nodes.

The job's stdout and stderr are printed from its result when it has ended, and its exit code becomes that of the command. Ctrl-C
cancels the job at all nodes; SIGTERM leaves it, and the same --job-id resumes it. Nothing here needs Linux.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.cli import result
from tasuki.cli.command import Destination, Duration, command, connection_options, duration, flag
from tasuki.cli.connect import are_named, open_agents_client
from tasuki.cli.output import ExitCode, Output, table
from tasuki.core.failover.events import WAY_IN
from tasuki.core.failover.nodes import Ranked
from tasuki.core.units import shown_duration, shown_size
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client.agents.client import AgentResult, AsyncAgentsClient, RunProgress

# Fields of a job that need a server, with their options.
NEEDS_A_SERVER = {
    "subject": "--subject",
    "cwd": "--cwd",
    "env": "--env",
    "payload": "--payload-file",
    "max_retries": "--retries",
    "priority": "--priority",
    "not_before": "--not-before",
    "not_after": "--not-after",
    "permanent_exit_codes": "--permanent-exit",
    "retry_exit_codes": "--retry-exit",
}
USUAL_PRIORITY = 5


# ---------------------------------------------------------------------------------------------------- run


def are_meant(place: Destination, hedge: float | None, give_up_after: float | None) -> bool:
    """Return whether `run` goes to node agents. Raise InvalidInput for options that only they have, if it goes elsewhere."""
    if are_named(place):
        return True
    option = "--hedge" if hedge is not None else "--give-up-after" if give_up_after is not None else ""
    if option:
        raise InvalidInput(f"{option} is for node agents; name them with --to agents:http://n1:7090,http://n2:7090")
    return False


def _check(fields: dict[str, Any]) -> None:
    """Raise InvalidInput for a job that needs a server."""
    for name, option in NEEDS_A_SERVER.items():
        value = fields.get(name)
        if value and (name != "priority" or value != USUAL_PRIORITY):
            raise InvalidInput(f"{option} needs a server; node agents take EXEC, its arguments, --file, --job-id and --timeout")
    if not fields["exec"]:
        raise InvalidInput("handlers need a server and workers; name a program that the agents allow")


async def run_on_agents(
    place: Destination,
    fields: dict[str, Any],
    output_file: Path | None,
    output: Output,
    hedge_s: float | None,
    limit_s: float | None,
) -> int:
    """Run a job on node agents, and return the exit code of `tasuki run`."""
    _check(fields)
    with result.saved_to(output_file) as path:
        async with open_agents_client(place) as client:
            job_id = fields["job_id"] or client.new_id()
            output.progress(f"job {job_id}: looking for a node …")
            nodes: set[str] = set()

            def show_progress(progress: RunProgress) -> None:
                nodes.add(progress.node)
                output.progress(f"job {job_id}: {_describe_progress(progress)}")

            try:
                ended = await client.run(
                    fields["exec"],
                    fields["args"],
                    files=fields["files"],
                    output=path,
                    job_id=job_id,
                    known=fields["job_id"] is not None,
                    timeout_s=fields["timeout_s"],
                    limit_s=limit_s,
                    hedge_s=hedge_s,
                    on_progress=show_progress,
                    on_note=lambda text: output.hint(f"tasuki: job {job_id}: {text}"),
                )
            except asyncio.CancelledError:
                await _cancel(client, job_id, set(client.agents) if fields["job_id"] else nodes, output)
                return ExitCode.INTERRUPTED
            return _deliver(ended, output)


async def _cancel(client: AsyncAgentsClient, job_id: str, nodes: set[str], output: Output) -> None:
    """Cancel a job everywhere. `nodes`: those that may have it."""
    from tasuki.client.agents.client import NOT_KNOWN, REMOVED, STOPPING

    output.hint(f"canceling job {job_id} …  (Ctrl-C again: leave it)")
    answers = await client.cancel(job_id)
    if output.json:
        output.show({"job_id": job_id, "canceled": answers}, list)
    stopping = [node for node, answer in answers.items() if answer == STOPPING]
    if stopping:
        output.hint(
            f"the job is still being stopped at {', '.join(stopping)}: its program did not end at once, and will be killed"
        )
    sure = (REMOVED, NOT_KNOWN, STOPPING)
    unsure = [f"{node}: {answer}" for node, answer in answers.items() if answer not in sure and node in nodes]
    if unsure:
        output.hint(f"the job may still run at {'; '.join(unsure)}")


def _describe_progress(progress: RunProgress) -> str:
    if progress.stage == "run":
        done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
        return f"runs at {progress.node}{done} {progress.message}".rstrip()
    total = f" of {shown_size(progress.total_bytes)}" if progress.total_bytes is not None else ""
    return f"{progress.stage} {shown_size(progress.done_bytes)}{total}, {progress.node}"


def _deliver(ended: AgentResult, output: Output) -> int:
    code = exit_code_of(ended)
    captured = result.CapturedOutput(output)
    output.end_progress()
    if ended.path is not None:
        captured.print_result(ended.path, is_command=True)
    code = result.check_left_out(ended.job_id, ended.left_out, code, output)
    if output.json:
        captured.show(_describe(ended), code)
    elif ended.path is None:
        output.hint(f"tasuki: job {ended.job_id} {ended.outcome}, and {ended.node} was lost before its result could be fetched")
    elif ended.error_code not in (None, "EXIT_CODE"):
        output.hint(f"tasuki: {ended.error_code}: job {ended.job_id}: {ended.message or ended.outcome}")
    return code


def exit_code_of(ended: AgentResult) -> int:
    """Return the program's own exit code, or the code that says why it has none."""
    if ended.succeeded:
        return ExitCode.OK
    if ended.outcome == "timed_out":
        return ExitCode.TIME_LIMIT
    return ended.exit_code if ended.exit_code and ended.error_code in result.ENDED_ITSELF else ExitCode.COULD_NOT_RUN


def _describe(ended: AgentResult) -> dict[str, Any]:
    """Return how a job ended, for programs, with the names of `tasuki run` on a server."""
    return {
        "job_id": ended.job_id,
        "state": ended.outcome.upper(),
        "node": ended.node,
        "cached": ended.cached,
        "exit_code": ended.exit_code,
        "error_code": ended.error_code,
        "message": ended.message,
        "result_sha256": ended.sha256 or None,
        "left_out": ended.left_out,
    }


# ---------------------------------------------------------------------------------------------------- nodes


@command(
    "nodes",
    examples=[
        "tasuki nodes --to agents:http://n1:7090,http://n2:7090",
        "tasuki nodes --to agents:https://n1:7090,n2:7090 --token-file token --tls-ca ca.pem --watch",
        "tasuki nodes --to agents:http://n1:7090 --json",
    ],
)
@flag("--watch", help="Again and again, until Ctrl-C.")
@duration("--interval", type=Duration(0.1), default=2.0, help="With --watch.")
@connection_options("Node agents: agents:http://n1:7090,http://n2:7090. Default: TASUKI_URL.", "AGENTS")
def nodes(output: Output, watch: bool, interval: float, place: Destination) -> int:
    """A node that failed is left out for 30 s, and until three health checks in a row were good.

    Each look of this command is one. Exits with 5 if no node takes jobs.
    """
    return asyncio.run(show_nodes(place, output, interval if watch else None))


async def show_nodes(place: Destination, output: Output, interval_s: float | None) -> int:
    """Check all nodes at once and list them, the best first; again and again if there is an interval."""
    async with open_agents_client(place) as client:
        while True:
            ranking = await client.ranking()
            if interval_s is not None:
                output.clear_screen()
            output.show([node.view() for node in ranking], functools.partial(_node_lines, ranking))
            for node in ranking:
                if node.refusal is not None and node.refusal.status == 401:
                    output.hint(f"tasuki: {node.node} does not take the token; {WAY_IN}")
            if interval_s is None:
                usable = any(node.standing.name in ("FREE", "FULL") for node in ranking)
                return ExitCode.OK if usable else ExitCode.UNAVAILABLE
            await asyncio.sleep(interval_s)


def _node_lines(ranking: list[Ranked]) -> list[str]:
    def cells(node: Ranked) -> tuple[object, ...]:
        breaker = str(node.breaker)
        if breaker != "closed":
            breaker = f"{breaker}, {shown_duration(node.left_out_s)}, {node.good_checks} good"
        return node.node, node.standing.name.lower(), node.running, node.limit, breaker, node.last_answer

    return table(("NODE", "STANDING", "RUNNING", "LIMIT", "BREAKER", "SAID"), map(cells, ranking))
