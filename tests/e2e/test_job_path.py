"""A reader who follows one job opens few files; ARCHITECTURE.md lists them."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import job_path  # noqa: E402


def listed_files() -> set[str]:
    """Return the files in the table of ARCHITECTURE.md, whose later entries of a cell leave their folder out."""
    found, table = set(), (ROOT / "ARCHITECTURE.md").read_text().partition("### The files on its path")[2].partition("## ")[0]
    for row in re.findall(r"^\|.*\|$", table, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([a-z_/]+\.py)`", row):
            folder = name.rpartition("/")[0] if "/" in name else folder
            found.add(f"{folder}/{name.rpartition('/')[2]}")
    return found


def test_one_job_runs_through_few_files_and_the_map_lists_them() -> None:
    with ThreadPoolExecutor(len(job_path.SCENARIOS)) as threads:
        paths = dict(zip(job_path.SCENARIOS, threads.map(job_path.path_of, job_path.SCENARIOS), strict=True))

    over = {name: path for name, path in paths.items() if len(path) > job_path.LIMITS[name]}
    assert not over
    listed = listed_files()
    assert set(paths["submit"]) <= listed
    assert not [name for name in listed if not (job_path.ROOT / name).exists()]
