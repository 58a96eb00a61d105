"""The frame around every command: its examples at the end of its help, its errors as one line, its exit code.

Imported for `tasuki --help`, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from tasuki.cli import exits
from tasuki.cli.output import Output
from tasuki.errors import TasukiError

Function = TypeVar("Function", bound=Callable[..., Any])

# For `run` and `submit`: everything from the exec's name on belongs to the job, also what looks like an option.
TAKES_A_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def make_app(help: str, epilog: str | None = None, *, no_args_is_help: bool = True) -> typer.Typer:
    """A typer application without colours, completion and decorated tracebacks: each costs start-up time."""
    return typer.Typer(
        help=help,
        epilog=epilog,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=no_args_is_help,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def command(
    app: typer.Typer,
    name: str,
    *,
    examples: Sequence[str],
    exit_code: Callable[[TasukiError], int] = exits.exit_code,
    hidden: bool = False,
    settings: dict[str, Any] | None = None,
) -> Callable[[Function], Function]:
    """Register a command. An integer that the function returns becomes the exit code."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def framed(*args: Any, **kwargs: Any) -> None:
            raise typer.Exit(run_framed(lambda: function(*args, **kwargs), bool(kwargs.get("json")), exit_code))

        app.command(name, epilog=epilog_of(examples), hidden=hidden, context_settings=settings)(framed)
        return function

    return register


def run_framed(work: Callable[[], int | None], json: bool, exit_code: Callable[[TasukiError], int] = exits.exit_code) -> int:
    """Do the work; an error that tasuki raised on purpose is told in one line, anything else is a bug and shows itself."""
    try:
        return work() or exits.OK
    except TasukiError as error:
        Output(json=json).error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.OK


def epilog_of(examples: Sequence[str]) -> str:
    """Worked commands, line by line as they are (the \\b keeps them from being wrapped)."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
