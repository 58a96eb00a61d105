"""The readers find what they look for: a shape test that overlooks its subject would stay green for ever."""

import textwrap
from pathlib import Path

import pytest

from tests.shape.source import Module, length, modules, syntax_errors, touched


def module(text: str, path: str = "stores/store.py") -> Module:
    return Module(path, textwrap.dedent(text))


@pytest.mark.parametrize(
    ("text", "name", "lazy"),
    [
        ("import a.b", "a.b", False),
        ("import a.b as c", "a.b", False),
        ("from a.b import c", "a.b.c", False),
        ("from . import memory", "tasuki.stores.memory", False),
        ("from ..core import job", "tasuki.core.job", False),
        ("def f():\n    import a", "a", True),
        ("async def f():\n    from a import b", "a.b", True),
        ("class C:\n    import a", "a", False),
        ("try:\n    import a\nexcept ImportError:\n    pass", "a", False),
        ("if TYPE_CHECKING:\n    import a", "a", True),
        ("if typing.TYPE_CHECKING:\n    from a import b", "a.b", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import a", "a", False),
        ("importlib.import_module('a.b')", "a.b", False),
        ("def f():\n    return __import__('a')", "a", True),
    ],
)
def test_an_import_is_found_wherever_it_stands(text: str, name: str, lazy: bool) -> None:
    found = module(text).imports

    assert [(found.name, found.lazy) for found in found if found.name != "importlib"] == [(name, lazy)]


@pytest.mark.parametrize(
    "text",
    ["import os\nos.environ['A']", "import os as o\no.environ", "from os import environ\nenviron.get('A')"],
)
def test_an_attribute_is_found_under_any_alias(text: str) -> None:
    assert any(name.startswith("os.environ") for name, _ in touched(module(text)))


@pytest.mark.parametrize(
    ("path", "name", "part"),
    [
        ("stores/sql/store.py", "stores.sql.store", "stores"),
        ("stores/__init__.py", "stores", "stores"),
        ("errors.py", "errors", "errors"),
        ("__init__.py", "", ""),
        ("__main__.py", "__main__", ""),
    ],
)
def test_a_path_tells_the_name_and_the_part(path: str, name: str, part: str) -> None:
    assert (Module(path, "").name, Module(path, "").part) == (name, part)


def test_the_length_of_a_function_leaves_its_docstring_out() -> None:
    (function,) = module('def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n').functions

    assert length(function) == 3


def test_a_broken_file_is_reported_once_and_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def :")
    (tmp_path / "whole.py").write_text("x = 1")

    assert [error.partition(":")[0] for error in syntax_errors(tmp_path)] == ["broken.py"]
    assert [found.path for found in modules(tmp_path)] == ["whole.py"]
