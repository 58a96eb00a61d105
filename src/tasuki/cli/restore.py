"""`tasuki restore`: the store of a backup into a data folder, or only a check whether that would work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.output import Output, when

if TYPE_CHECKING:
    from tasuki.server.archive import Manifest


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "restore",
        examples=[
            "tasuki restore --check tasuki.tar                      # verify it, change nothing",
            "tasuki restore tasuki.tar --data /srv/tasuki           # into a folder without a store",
            "tasuki restore tasuki.tar --data /srv/tasuki --force   # what is there is moved aside, never deleted",
        ],
    )(restore)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What tasuki backup made.")],
    data: options.Data = None,
    force: Annotated[bool, typer.Option("--force", help="Move a store that is there aside, to DATA/replaced-TIME.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only verify the backup.")] = False,
    json: options.Json = False,
) -> None:
    """Restore a backup into a data folder.

    No server may be running on it. All is verified before anything is changed. What workers of the lost server still run can
    no longer be recorded: jobs that they had wait again, and cost no loss.
    """
    output = Output(json=json)
    if check:
        _check(file, output)
        return
    from tasuki.config import data_folder, fault_point
    from tasuki.server import restore as restoring
    from tasuki.server.assembly import kill_at

    done = restoring.restore(file.absolute(), data_folder(data), force=force, tell=output.progress, fault=kill_at(fault_point()))
    facts = {
        "data": done.data,
        "epoch": done.epoch,
        "given_back": done.given_back,
        "canceled": done.canceled,
        "replaced": done.replaced,
        **_facts(done.manifest),
    }
    output.show(
        facts,
        lambda: [
            f"{done.data}: {_summary(done.manifest)}; epoch {done.epoch}, {done.given_back} jobs that were running wait again",
            *([f"the store that was there is in {done.replaced}"] if done.replaced else []),
        ],
    )
    if not done.manifest.with_blobs:
        output.hint(f"this backup has no blobs: bring them back to {done.data}/blobs before a server starts")
    output.hint("tokens revoked since the backup are valid again: look at tasuki token list")


def _check(file: Path, output: Output) -> None:
    from tasuki.server.restore import check_backup

    manifest = check_backup(file.absolute(), tell=output.progress)
    output.show(
        {"file": str(file), "tasuki": manifest.tasuki, **_facts(manifest)}, lambda: [f"{file} is whole: {_summary(manifest)}"]
    )
    if manifest.missing:
        output.hint(f"{len(manifest.missing)} blobs were gone when it was made")


def _facts(manifest: Manifest) -> dict[str, object]:
    return {
        "made_at": manifest.made_at,
        "schema_version": manifest.schema_version,
        "jobs": manifest.jobs,
        "with_blobs": manifest.with_blobs,
        "blobs": len(manifest.blobs),
        "missing": [sha256 for sha256, _ in manifest.missing],
    }


def _summary(manifest: Manifest) -> str:
    return f"{sum(manifest.jobs.values()):,} jobs and {len(manifest.blobs):,} blobs of {when(manifest.made_at)}"
