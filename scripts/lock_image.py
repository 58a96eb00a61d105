"""Write deploy/requirements.txt and deploy/requirements-build.txt: what the image installs, with versions and hashes from PyPI.

usage: python3.12 scripts/lock_image.py        (the Python of deploy/Dockerfile; pip decides by the Python that runs it)

pip resolves the dependencies of `tasuki[server,s3]` for each processor and reports the hash of each wheel; nothing is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("server", "s3")
PROCESSORS = ("x86_64", "aarch64")
LIBCS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
HEAD = "# Made by scripts/lock_image.py from pyproject.toml; do not edit by hand.\n"


def locked(requirements: list[str]) -> str:
    """Return the lines of a requirements file for these requirements and all that they need."""
    hashes: dict[str, set[str]] = {}
    for processor in PROCESSORS:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            platforms = [f"--platform={libc}_{processor}" for libc in LIBCS]
            command = [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", "--dry-run", "--ignore-installed"]
            command += ["--index-url=https://pypi.org/simple", "--only-binary=:all:", *platforms]
            subprocess.run([*command, f"--target={folder}/none", f"--report={report}", *requirements], check=True)
            for item in json.loads(report.read_text())["install"]:
                name = f"{item['metadata']['name'].lower().replace('_', '-')}=={item['metadata']['version']}"
                hashes.setdefault(name, set()).add(item["download_info"]["archive_info"]["hashes"]["sha256"])
    return HEAD + "".join(
        " \\\n    ".join([name, *(f"--hash=sha256:{digest}" for digest in sorted(digests))]) + "\n"
        for name, digests in sorted(hashes.items())
    )


def main() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    project = tomllib.loads(text)
    extras = [requirement for extra in EXTRAS for requirement in project["project"]["optional-dependencies"][extra]]
    (ROOT / "deploy/requirements.txt").write_text(locked(project["project"]["dependencies"] + extras))
    (ROOT / "deploy/requirements-build.txt").write_text(locked(project["build-system"]["requires"]))


if __name__ == "__main__":
    main()
