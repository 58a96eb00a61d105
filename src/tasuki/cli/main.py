"""The `tasuki` command: puts the nouns together. Imports of each command's machinery stand inside the commands."""

from __future__ import annotations

import typer

from tasuki.cli import doctor, exits, job, migrate, result, run, server, stats, submit, token, up, worker
from tasuki.cli.command import command, make_app

HELP = "Runs commands on many machines, and keeps its promise when machines die."
EPILOG = f"""\b
Examples:
  tasuki run echo hello                     # no server needed
  tasuki up                                 # server and local workers, until Ctrl-C
  tasuki submit --array 1-100 simulate --seed {{i}}
  tasuki explain JOB

\b
Exit codes:
{exits.table()}

Every command has --json, and examples at the end of its own --help."""


def make() -> typer.Typer:
    """The whole command tree."""
    app = make_app(HELP, EPILOG)
    app.callback(invoke_without_command=True)(_root)
    for noun in (run, submit, job, result, up, server, worker, token, stats, doctor, migrate):
        noun.add_to(app)
    app.command("demo", help="Show jobs surviving the death of a worker and of the server.", context_settings=PASSES_ON)(_demo)
    return app


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version."),
) -> None:
    if version:
        from tasuki import __version__

        print(f"tasuki {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


# The demo brings its own options: all words go on to it unread, --help too.
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _demo(context: typer.Context) -> None:
    from tasuki.cli import demo

    app = make_app("")
    command(app, "demo", examples=["tasuki demo", "tasuki demo --json"])(demo.demo)
    app(args=context.args, prog_name="tasuki demo")


def main() -> None:
    """What the `tasuki` script and `python -m tasuki` call."""
    make()(prog_name="tasuki")
