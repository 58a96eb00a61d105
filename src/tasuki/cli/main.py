"""The `tasuki` command: loads the module of the word that was given, and no other.

The modules of all commands would take longer to import than everything else that `tasuki --help` does.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click

from tasuki.cli.command import COMMANDS, HELP_NAMES, SECTIONS, drop_output, missing_module
from tasuki.cli.output import ExitCode, exit_code_table, tell

HELP = "Runs commands on many machines, and keeps its promise when machines die."
EPILOG = f"""\b
Examples:
  tasuki run echo hello                     # no server needed
  tasuki up                                 # server and local workers, until Ctrl-C
  tasuki submit --array 1-100 simulate --seed {{i}}
  tasuki explain JOB

\b
Exit codes:
{exit_code_table()}

Every command has --json, and examples at the end of its own --help."""


class _LazyGroup(click.Group):
    """A group that imports a command when its word is used, and lists all words from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(".")
        try:
            command: click.Command = getattr(import_module(f"tasuki.cli.{module}"), name)
        except ModuleNotFoundError as error:
            missing = missing_module(error)
            if missing is None:
                raise
            raise click.UsageError(missing.message) from None
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        with _one_line_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line_errors():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, words in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(word.ljust(width), summary) for word, (_, summary) in words.items()])


class _WrongWords(click.ClickException):
    """Wrong options or arguments, told in one line."""

    exit_code = ExitCode.USAGE

    def show(self, file: Any = None) -> None:
        tell(f"tasuki: USAGE: {self.message}")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Tell click's errors, which quote the arguments, in one line that ends with the way to the help."""
    try:
        yield
    except (click.exceptions.NoArgsIsHelpError, _WrongWords):
        raise
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "tasuki"
        said = " ".join(error.format_message().split()).rstrip(".")
        raise _WrongWords(f"{said}; see: {path} --help") from None


@click.command(cls=_LazyGroup, help=HELP, epilog=EPILOG, invoke_without_command=True, context_settings=HELP_NAMES)
@click.option("--version", is_flag=True, help="Show the version.")
@click.pass_context
def root(context: click.Context, version: bool) -> None:
    if version:
        from tasuki.version import __version__

        click.echo(f"tasuki {__version__}")
        context.exit()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    """Run the `tasuki` script, or `python -m tasuki`."""
    # A collection after every 700 new containers takes 20 of the 300 ms of a server's start, and 6 % of its time under load.
    gc.set_threshold(50_000, 20, 50)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`): the next file to be opened would take its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    try:
        root(prog_name="tasuki")
    except OSError as error:  # of the help, which no command prints
        tell(f"tasuki: ERROR: the output cannot be written: {error.strerror or error}")
        drop_output()
        sys.exit(ExitCode.FAILED)
