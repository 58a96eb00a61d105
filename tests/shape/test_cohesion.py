"""The parts fit together: no import cycles, no crumbs, no class name with two meanings, and only words from the glossary."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch

import pytest

from tests.shape.source import PACKAGE, ROOT, Module, modules

TINY_LINES = 80
# A module below TINY_LINES that only one module of its own package imports belongs into that module, unless there is a reason.
TINY_ALLOWED: dict[str, str] = {}

_ROW = re.compile(r" {4}(`?[a-z_]+(?:\.py|/)?`?(?:, [a-z_]+(?:\.py|/)?)*) {2,}\S.*")
"""A row of the table in a folder's docstring: the names of modules and folders, and behind two spaces their subject."""
CONCEPTS = ROOT / "docs" / "concepts.md"
PLAIN_WORDS = ROOT / "tests" / "shape" / "plain_words.txt"
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")


def import_graph(found: Iterable[Module]) -> dict[str, set[str]]:
    """The imports of each module, by dotted name below `tasuki`. Lazy and type-only imports count as well."""
    by_name = {module.name: module for module in found}
    return {name: {other for other in _reached(module, by_name) if other != name} for name, module in by_name.items()}


def _reached(module: Module, by_name: Mapping[str, Module]) -> Iterable[str]:
    for imported in module.imports:
        if imported.within("tasuki"):
            below = imported.name.removeprefix("tasuki").removeprefix(".")
            target = below if below in by_name else below.rpartition(".")[0]
            if target in by_name:
                yield target


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other, directly or by way of others."""
    below = {name: _closure(graph, name) for name in graph}
    rings = {
        frozenset({name, *(other for other in found if name in below[other])}) for name, found in below.items() if name in found
    }
    return [set(ring) for ring in rings]


def _closure(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def crumbs(found: list[Module]) -> list[str]:
    importers: defaultdict[str, list[str]] = defaultdict(list)
    for name, others in import_graph(found).items():
        for other in others:
            importers[other].append(name)
    return [
        module.path
        for module in found
        if not module.path.endswith(("__init__.py", "__main__.py"))
        and len(module.text.splitlines()) < TINY_LINES
        and [name.rpartition(".")[0] for name in importers[module.name]] == [module.name.rpartition(".")[0]]
    ]


def classes(found: Iterable[Module]) -> dict[str, list[str]]:
    """The modules that define each public class. Django's own names for inner and command classes are not ours."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in {"Meta", "Command"}:
                places[node.name].append(module.path)
    return places


def words_of(name: str) -> list[str]:
    """`HttpWorkerLink` and `http_worker_link` are http, worker, link."""
    return [word.lower() for part in name.split("_") for word in _WORD.findall(part)]


def glossary() -> set[str]:
    """The words of the glossary's first column, with the forms in brackets."""
    section = CONCEPTS.read_text(encoding="utf-8").partition("\n## Glossary\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| \*\*(.+?)\*\*([^|]*)\|", section, re.MULTILINE)
    return {word.lower() for cell in cells for word in re.findall(r"[A-Za-z0-9]+", " ".join(cell))}


def plain_words() -> set[str]:
    lines = (line.partition("#")[0] for line in PLAIN_WORDS.read_text(encoding="utf-8").splitlines())
    return {word for line in lines for word in line.split()}


def is_form_of(word: str, known: set[str]) -> bool:
    """`jobs` and `leased` are forms of `job` and `lease`."""
    stems = {word, word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ed"), word.removesuffix("d")}
    stems |= {
        word.removesuffix("ing"),
        word.removesuffix("ing") + "e",
        re.sub(r"(.)\1(ed|ing)$", r"\1", word),
        re.sub("ies$|ied$", "y", word),
    }
    return bool(stems & known)


def unknown_words(found: list[Module], known: set[str]) -> dict[str, list[str]]:
    """Words of module names and public class names that no list has, with the names that use them."""
    unknown: defaultdict[str, list[str]] = defaultdict(list)
    names = {part for module in found for part in module.name.split(".") if not part.startswith("__")} | set(classes(found))
    for name in sorted(names):
        for word in words_of(name):
            if not is_form_of(word, known):
                unknown[word].append(name)
    return dict(unknown)


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycles(import_graph(modules())) == []


def test_no_module_is_a_crumb_of_another() -> None:
    found = crumbs(modules())

    assert [path for path in found if not any(fnmatch(path, allowed) for allowed in TINY_ALLOWED)] == []
    assert set(TINY_ALLOWED) <= set(found), f"not needed any more: {set(TINY_ALLOWED) - set(found)}"


def test_a_class_name_has_one_meaning() -> None:
    assert {name: paths for name, paths in classes(modules()).items() if len(paths) > 1} == {}


def test_names_are_made_of_words_that_are_explained_or_plain() -> None:
    assert unknown_words(modules(), glossary() | plain_words()) == {}


def test_every_plain_word_is_used_and_is_not_a_word_of_the_glossary() -> None:
    found = modules()
    names = {part for module in found for part in module.name.split(".")} | set(classes(found))
    used = {word for name in names for word in words_of(name)}

    assert {word for word in plain_words() if not any(is_form_of(other, {word}) for other in used)} == set()
    assert {word for word in plain_words() if is_form_of(word, glossary())} == set()


def test_the_glossary_can_be_read_at_one_sitting() -> None:
    section = CONCEPTS.read_text(encoding="utf-8").partition("\n## Glossary\n")[2].partition("\n## ")[0]

    assert 30 <= len(re.findall(r"^\| \*\*", section, re.MULTILINE)) <= 60


@pytest.mark.parametrize(
    "imports",
    [
        ["from tasuki.a import b", "from tasuki.a import a"],
        ["if TYPE_CHECKING:\n    from tasuki.a.b import x", "def f():\n    import tasuki.a.a"],
    ],
)
def test_a_cycle_is_seen(imports: list[str]) -> None:
    found = [Module("a/a.py", imports[0]), Module("a/b.py", imports[1]), Module("a/c.py", "import tasuki.a.a")]

    assert cycles(import_graph(found)) == [{"a.a", "a.b"}]


def test_a_crumb_is_seen() -> None:
    user = Module("a/user.py", "from tasuki.a.crumb import x")

    assert crumbs([Module("a/crumb.py", "x = 1"), user]) == ["a/crumb.py"]
    assert crumbs([Module("a/crumb.py", "x = 1\n" * TINY_LINES), user]) == []
    assert crumbs([Module("a/crumb.py", "x = 1"), user, Module("b/user.py", user.text)]) == []


def test_a_name_that_means_two_things_is_seen() -> None:
    assert classes([Module("a.py", "class Link: ..."), Module("b.py", "class Link: ...")])["Link"] == ["a.py", "b.py"]


def test_a_private_word_is_seen() -> None:
    assert unknown_words([Module("a/desk.py", "class LogDesk: ...")], {"a", "log"}) == {"desk": ["LogDesk", "desk"]}


def test_each_folder_says_what_is_in_it_and_what_may_import_it() -> None:
    """A docstring of a folder names each of its modules and folders, none that is not there, and speaks of imports."""
    problems = []
    found = modules()
    folders = {module.path.removesuffix("__init__.py"): module for module in found if module.path.endswith("/__init__.py")}
    for folder, init in folders.items():
        if folder.startswith(("django/migrations/", "django/management/")):  # Django's own layout
            continue
        text = ast.get_docstring(init.tree) or ""
        listed = {name.strip("` ") for line in text.splitlines() if (row := _ROW.fullmatch(line)) for name in row[1].split(",")}
        inside = {
            path.removeprefix(folder).partition("/")[0] for path in (module.path for module in found) if path.startswith(folder)
        }
        names = {name.removesuffix(".py") for name in inside} - {"__init__"}
        problems += [f"{folder}: {name} is not named" for name in sorted(names) if not re.search(rf"(?<!\w){name}(?!\w)", text)]
        gone = {name for name in listed if not (PACKAGE / folder / name).exists() and name.removesuffix(".py") not in names}
        problems += [f"{folder}: {name} is not there" for name in sorted(gone)]
        problems += [f"{folder}: no word about imports"] if "import" not in text.lower() else []
    assert not problems
