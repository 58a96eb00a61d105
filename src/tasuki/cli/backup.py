"""`tasuki backup`: the SQLite store of a data folder in one file, while its server runs or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tasuki.cli import exit_codes, options
from tasuki.cli.command import command
from tasuki.cli.output import Output


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "backup",
        examples=[
            "tasuki backup --data /srv/tasuki /backup/tasuki-$(date +%F).tar",
            "tasuki backup --no-blobs store.tar      # the bytes of large files and results are saved in another way",
            "tasuki restore --check store.tar        # can it be restored?",
        ],
    )(backup)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The backup, a tar file; replaced if it exists.")],
    data: options.Data = None,
    blobs: Annotated[bool, typer.Option("--blobs/--no-blobs", help="With the bytes of large inputs and results.")] = True,
    json: options.Json = False,
) -> int:
    """Save the SQLite store of a data folder.

    The server may go on running. Tokens are in the backup as hashes only; the folder's own admin token file is not in it.
    """
    from tasuki.config import data_folder
    from tasuki.server.backup import back_up

    output = Output(json=json)
    made = back_up(data_folder(data), file.absolute(), with_blobs=blobs, tell=output.progress)
    size_bytes = file.stat().st_size
    facts = {
        "file": str(file),
        "size_bytes": size_bytes,
        "made_at": made.made_at,
        "schema_version": made.schema_version,
        "epoch": made.epoch,
        "jobs": made.jobs,
        "database_sha256": made.database_sha256,
        "with_blobs": made.with_blobs,
        "blobs": len(made.blobs),
        "blob_bytes": made.blob_bytes,
        "missing": [sha256 for sha256, _ in made.missing],
    }
    output.show(facts, lambda: [f"{file}: {sum(made.jobs.values()):,} jobs, {len(made.blobs):,} blobs, {size_bytes:,} bytes"])
    if made.missing:
        output.hint(
            f"{len(made.missing)} blobs that jobs refer to are gone or damaged, and are not in the backup (--json names them); "
            "if they are kept elsewhere (--blobs of the server), use --no-blobs"
        )
    return exit_codes.FAILED if made.missing else exit_codes.OK
