"""The frame around every command: its examples at the end of its help, its errors as one line, its exit code.

Imported for `tasuki --help`, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from tasuki.cli import exit_codes
from tasuki.cli.output import Output
from tasuki.cli.parameters import PlainCommand, PlainGroup
from tasuki.errors import TasukiError

COMMAND_LINE, ENVIRONMENT = "COMMANDLINE", "ENVIRONMENT"  # typer's names for where a value came from
Function = TypeVar("Function", bound=Callable[..., Any])

# For `run` and `submit`: everything from the exec's name on belongs to the job, also what looks like an option.
TAKES_A_COMMAND = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def make_app(help: str, epilog: str | None = None, *, no_args_is_help: bool = True) -> typer.Typer:
    """A typer application without colours, completion and decorated tracebacks: each costs start-up time."""
    return typer.Typer(
        cls=PlainGroup,
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
    exit_code: Callable[[TasukiError], int] = exit_codes.exit_code,
    hidden: bool = False,
    settings: dict[str, Any] | None = None,
) -> Callable[[Function], Function]:
    """Register a command. An integer that the function returns becomes the exit code."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def framed(*args: Any, **kwargs: Any) -> None:
            raise typer.Exit(run_framed(lambda: function(*args, **kwargs), bool(kwargs.get("json")), exit_code))

        app.command(name, cls=PlainCommand, epilog=epilog_of(examples), hidden=hidden, context_settings=settings)(framed)
        return function

    return register


def command_group(app: typer.Typer, name: str, *, examples: Sequence[str]) -> Callable[[Function], typer.Typer]:
    """Register a command that has others below it: `tasuki worker` runs one, `tasuki worker status` looks. Returns where."""

    def register(function: Function) -> typer.Typer:
        def framed(context: typer.Context, **given: Any) -> None:
            if context.invoked_subcommand is None:
                raise typer.Exit(run_framed(lambda: function(**given), bool(given.get("json"))))
            if options_of(context, COMMAND_LINE):
                context.fail(f"options stand behind the word they are for: {context.command_path} {context.invoked_subcommand} …")

        take_parameters(framed, function)
        below = make_app(inspect.getdoc(function) or "", no_args_is_help=False)
        below.callback(invoke_without_command=True, epilog=epilog_of(examples))(framed)
        app.add_typer(below, name=name)
        return below

    return register


def take_parameters(taker: Callable[..., Any], *givers: Callable[..., Any]) -> None:
    """Make typer see the parameters and the help of these functions in one that takes `**options`, beside its own."""
    own = [one for one in inspect.signature(taker, eval_str=True).parameters.values() if one.kind is not one.VAR_KEYWORD]
    given = [one for giver in givers for one in inspect.signature(giver, eval_str=True).parameters.values()]
    every = [one.replace(kind=one.KEYWORD_ONLY) for one in {one.name: one for one in (*own, *given)}.values()]
    taker.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    taker.__annotations__ = {one.name: one.annotation for one in every}
    taker.__doc__ = taker.__doc__ or givers[0].__doc__


def options_of(context: typer.Context, *sources: str) -> dict[str, Any]:
    """What was given there, by parameter: not what is a default."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in found.items() if source is not None and source.name in sources}


def run_framed(work: Callable[[], int | None], json: bool, exit_code: Callable[[TasukiError], int] = exit_codes.exit_code) -> int:
    """Do the work; an error that tasuki raised on purpose is told in one line, anything else is a bug and shows itself."""
    try:
        return work() or exit_codes.OK
    except TasukiError as error:
        Output(json=json).error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Python would complain once more when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK


def epilog_of(examples: Sequence[str]) -> str:
    """Worked commands, line by line as they are (the \\b keeps them from being wrapped)."""
    return "\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples)
