"""Which exit codes are worth another attempt: the rules of an exec and of a job, and what they make of an outcome. Pure.

    permanent_exit_codes    these never retry
    retry_exit_codes        only these retry; every other exit code is permanent

What a job says about a code counts before what its exec says. Without a rule every failure may be tried again.

A program killed by signal n has the code 128 + n, as a shell shows it. Signals come from outside (a machine without memory, an
operator, a limit), so they stay retryable unless `permanent_exit_codes` has their code: `retry_exit_codes` is about codes that
a program chose. A time limit, a cancel and a lost lease are no exits, whatever code the program ended with under them.
"""

from __future__ import annotations

import msgspec

from tasuki.core.job import JobSpec, Outcome

BY_EXIT = "EXIT_CODE"
BY_SIGNAL = frozenset({"SIGNAL", "OOM", "PROCESS_LIMIT", "CPU_LIMIT", "FILE_SIZE_LIMIT"})


class ExitRules(msgspec.Struct, frozen=True, kw_only=True):
    """What one side, exec or job, says about exit codes. None: nothing; empty: none of them."""

    permanent: tuple[int, ...] | None = None
    retry: tuple[int, ...] | None = None


NO_RULES = ExitRules()


def rules_of(spec: JobSpec) -> ExitRules:
    """What the job itself says."""
    return ExitRules(permanent=spec.permanent_exit_codes or None, retry=spec.retry_exit_codes or None)


def judged(outcome: Outcome, exec_name: str, of_exec: ExitRules = NO_RULES, of_job: ExitRules = NO_RULES) -> Outcome:
    """The outcome, permanent if a rule says so; its message then names the rule."""
    code = outcome.exit_code
    if code is None or outcome.permanent or outcome.error_code not in {BY_EXIT, *BY_SIGNAL}:
        return outcome
    why = _why_permanent(code, outcome.error_code == BY_EXIT, f"exec {exec_name!r}", of_exec, of_job)
    return msgspec.structs.replace(outcome, permanent=True, message=f"{outcome.message}; {why}") if why else outcome


def _why_permanent(code: int, chosen: bool, exec_: str, of_exec: ExitRules, of_job: ExitRules) -> str:
    """In the order in which rules count; nothing if the code may be tried again."""
    if code in (of_job.permanent or ()):
        return f"exit code {code} is permanent for this job"
    if code in (of_job.retry or ()):
        return ""
    if of_job.permanent is None and code in (of_exec.permanent or ()):
        return f"exit code {code} is permanent for {exec_}"
    if chosen and of_job.retry is not None:
        return f"exit code {code} is permanent for this job, which retries only {_listed(of_job.retry)}"
    if chosen and of_job.retry is None and of_exec.retry is not None and code not in of_exec.retry:
        return f"exit code {code} is permanent for {exec_}, which retries only {_listed(of_exec.retry)}"
    return ""


def _listed(codes: tuple[int, ...]) -> str:
    return ", ".join(map(str, codes)) or "none"
