"""Make the Python code of the .proto files anew, or with --check compare it with what is committed.

python scripts/make_proto.py [--check]
"""

from __future__ import annotations

import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "tasuki/v1/worker.proto"
MADE = ROOT / "src" / "tasuki" / "doors" / "grpc"
"""Only the messages are made: the table of methods is in `service.py`, and callers name the method that they call."""


def make(folder: Path) -> list[Path]:
    """Have protoc write the modules below the folder, and return them."""
    from grpc_tools import protoc

    included = str(files("grpc_tools") / "_proto")
    if protoc.main(["", f"-I{ROOT / 'proto'}", f"-I{included}", f"--python_out={folder}", f"--pyi_out={folder}", SOURCE]):
        raise SystemExit(f"protoc did not understand proto/{SOURCE}")
    return sorted(path for path in folder.rglob("*_pb2.py*") if path.is_file())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = {MADE / path.name: path.read_text("utf-8") for path in make(Path(folder))}
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text, "utf-8")
        return
    old = [path.relative_to(ROOT) for path, text in made.items() if not path.exists() or path.read_text("utf-8") != text]
    if old:
        raise SystemExit(f"{', '.join(map(str, old))}: not what proto/{SOURCE} makes; run: python scripts/make_proto.py")


if __name__ == "__main__":
    main()
