"""The `tasuki` command: which words there are, and where each lives.

Building typer's parameters for all commands costs 60 ms and their imports 50 more, so only the command that was asked for is
loaded; `tasuki --help` needs none of them. That is why the one-line descriptions stand here (a test compares them).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from tasuki.cli import exit_codes
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
{exit_codes.table()}

Every command has --json, and examples at the end of its own --help."""

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("run", "Run one job: prints its output, exits with its code."),
    "submit": ("submit", "Submit jobs; returns when they are durable."),
    "status": ("job", "Where jobs stand, and how they ended."),
    "list": ("job", "Jobs, newest first."),
    "explain": ("job", "Why a job stands where it stands, and what befell it."),
    "result": ("result", "Wait for a job's end and save its result."),
    "logs": ("logs", "What a command writes, while it runs and afterwards."),
    "cancel": ("job", "Stop jobs."),
    "retry": ("job", "Set jobs going again that have ended."),
    "dead": ("dead_letters", "List, show and retry dead letters."),
    "stats": ("stats", "Jobs by group and state, and the workers that are connected."),
    "servers": ("cluster", "The servers that are alive on this store."),
    "workers": ("cluster", "The workers that are connected, to whichever server."),
    "nodes": ("nodes", "Node agents: which comes first, and which are left out."),
    "detach": ("cluster", "Give a worker no more work."),
    "attach": ("cluster", "Give a detached worker work again."),
    "up": ("up", "Start a server and local workers here."),
    "server": ("server", "Start a server; with --store, one of several."),
    "worker": ("worker", "Run jobs until a signal."),
    "agent": ("agent", "Run programs for whoever sends files over HTTP."),
    "dispatcher": ("dispatcher", "Send jobs to whichever node agent has a place."),
    "duties": ("duties", "Do a leader's duties once, for servers that scale to zero."),
    "token": ("token", "Make, list and revoke tokens."),
    "dev-cert": ("dev_cert", "Make a CA and a server's certificate, for development."),
    "doctor": ("doctor", "Check Python, SQLite, the data folder, its server and token"),
    "migrate": ("migrate", "Bring the tables of a store up to date."),
    "backup": ("backup", "Save the SQLite store of a data folder."),
    "restore": ("restore", "Restore a backup into a data folder."),
    "demo": ("demo", "Show jobs surviving the death of a worker and of the server."),
    "sim": ("sim", "Whole systems under faults, simulated and judged."),
}
"""word -> (module below tasuki.cli, what it does)"""


def make(arguments: Sequence[str]) -> typer.Typer:
    """The application for these arguments: with the command that they name, or with the names of all."""
    app = make_app(HELP, EPILOG, no_args_is_help=False)  # _root shows it, with exit code 0
    app.callback(invoke_without_command=True)(_root)
    word = next((argument for argument in arguments if not argument.startswith("-")), "")
    if word in COMMANDS:
        _load(app, word)
    else:
        for name, (_, text) in COMMANDS.items():
            app.command(name, help=text)(_unreached)
    return app


def _load(app: typer.Typer, word: str) -> None:
    module = import_module(f"tasuki.cli.{COMMANDS[word][0]}")
    if word == "demo":
        command(app, "demo", examples=["tasuki demo", "tasuki demo --json"])(module.demo)
    else:
        module.add_to(app)


def _unreached() -> None:
    """Stands for a command in the list of all; a word that is in the list is loaded instead."""
    raise AssertionError("a listed command was not loaded")


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version."),
) -> None:
    if version:
        from tasuki.version import __version__

        print(f"tasuki {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main() -> None:
    """What the `tasuki` script and `python -m tasuki` call."""
    arguments = sys.argv[1:]
    make(arguments)(args=arguments, prog_name="tasuki")
