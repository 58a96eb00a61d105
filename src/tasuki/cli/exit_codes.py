"""What the exit codes of `tasuki` mean: one table, shown by `tasuki --help`, used by every command.

`run` stands for its job: it exits with the job's own code, and where tasuki itself is the reason it uses 124 and 125, as
`timeout` and `env` do, so that a script can tell the two apart.
"""

from __future__ import annotations

from tasuki.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    TasukiError,
    Unauthorized,
    Unavailable,
)

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
FORBIDDEN = 4
UNAVAILABLE = 5
CONFLICT = 6
TIME_LIMIT = 124
COULD_NOT_RUN = 125
INTERRUPTED = 130
BROKEN_PIPE = 141  # what a program gets that is ended by SIGPIPE

MEANINGS: dict[int, str] = {
    OK: "done",
    FAILED: "a job did not succeed, or another error",
    USAGE: "wrong options, or input that can never work",
    NOT_FOUND: "no such job or token, or it is not yours",
    FORBIDDEN: "no valid token, or one that may not do this",
    UNAVAILABLE: "no server, too busy, disk full, or out of time: try again",
    CONFLICT: "the job id exists with another body",
    TIME_LIMIT: "run: the job passed its time limit",
    COULD_NOT_RUN: "run: an error of tasuki's own, instead of 1 and 3 to 6; see stderr",
    INTERRUPTED: "Ctrl-C; 128+n: ended by signal n",
    BROKEN_PIPE: "run: nobody reads the output any more; the job is canceled",
}

# The first that fits; a subclass stands before its base.
_BY_ERROR: tuple[tuple[type[TasukiError], int], ...] = (
    (NotFound, NOT_FOUND),
    (Unauthorized, FORBIDDEN),
    (Forbidden, FORBIDDEN),
    (Conflict, CONFLICT),
    (Unavailable, UNAVAILABLE),
    (DeadlineExceeded, UNAVAILABLE),
    (InvalidInput, USAGE),
    (ConfigError, USAGE),
)


def exit_code(error: TasukiError) -> int:
    """The code for an error that ended a command."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), FAILED)


def table() -> str:
    """The table as the help shows it."""
    return "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())
