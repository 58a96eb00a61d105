"""The names that `import tasuki` gives: those that the README shows, loaded when they are used, and never Django."""

import ast
import json
import re
import subprocess
import sys
from importlib import import_module

import pytest

import tasuki
from tests.conftest import require
from tests.shape.source import ROOT

README = ROOT / "README.md"
CODE_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = sorted(set(tasuki.__all__) - {"__version__"})


def readme() -> str:
    require("README.md", README.exists(), "it is written last")
    return README.read_text(encoding="utf-8")


def names_imported(code: str) -> set[str]:
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) and node.module == "tasuki")
    return {alias.name for node in nodes for alias in node.names}


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_public_name_has_a_home() -> None:
    assert sorted(tasuki._HOME) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_loaded_from_its_home(name: str) -> None:
    home = tasuki._HOME[name]
    require(f"{home}.{name}", hasattr(import_module(home), name), "its module is not written yet")

    assert getattr(tasuki, name) is getattr(import_module(home), name)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        _ = tasuki.Cleint


def test_dir_lists_the_public_names() -> None:
    assert set(tasuki.__all__) <= set(dir(tasuki))


def test_what_the_readme_imports_is_public() -> None:
    blocks = CODE_BLOCK.findall(readme())
    imported = {name for block in blocks for name in names_imported(block)}

    assert imported, "the README shows no `from tasuki import ...`"
    assert imported <= set(tasuki.__all__)


def test_the_page_for_python_shows_every_public_name() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")

    assert not [name for name in NAMES if not re.search(rf"\b{name}\b", text)]


def test_importing_tasuki_loads_its_version_and_nothing_else_of_it() -> None:
    assert {name for name in loaded_by("import tasuki") if name.startswith("tasuki")} == {"tasuki", "tasuki.version"}


@pytest.mark.parametrize("statement", ["import tasuki", "import tasuki.client", "import tasuki.worker"])
def test_clients_and_workers_never_import_django(statement: str) -> None:
    assert not {name for name in loaded_by(statement) if name.partition(".")[0] == "django"}


def test_the_probe_for_django_would_see_it() -> None:
    assert "django" in loaded_by("import django")
