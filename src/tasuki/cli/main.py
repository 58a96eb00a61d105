"""The `tasuki` command: loads the module of the word that was given, and no other.

The modules of all commands would take longer to import than everything else that `tasuki --help` does.
"""

from __future__ import annotations

import gc
from importlib import import_module
from typing import Any

import click

from tasuki.cli.command import COMMANDS, HELP_NAMES
from tasuki.cli.output import exit_code_table, visible

UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
ANYWHERE = ("run --to agents:…", "nodes")
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
            if error.name not in UNIX_MODULES:
                raise
            raise click.UsageError(f"tasuki {cmd_name} needs Linux; clients run here too: {', '.join(ANYWHERE)}") from None
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:  # click prints it, and quotes the argument
            error.message = visible(error.message)  # type: ignore[misc]
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(word, summary) for word, (_, summary) in COMMANDS.items()])


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
    root(prog_name="tasuki")
