"""Reading source files without importing them: which modules there are, what each imports, what it touches.

The rules themselves are in the tests beside this file; `test_source.py` shows that each reader finds what it looks for.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tasuki"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One imported name: `from a.b import c` is `a.b.c`, `import a.b` is `a.b`."""

    name: str
    line: int
    lazy: bool  # inside a function, or under TYPE_CHECKING: not executed when the module is imported

    def within(self, prefix: str) -> bool:
        return self.name == prefix or self.name.startswith(prefix + ".")


@dataclass(frozen=True)
class Module:
    """One source file. `path` is relative to the folder it was looked for in: `stores/sql/store.py`."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def name(self) -> str:
        """The dotted name below `tasuki`: `stores.sql`; `stores` for `stores/__init__.py`; '' for the root's."""
        return self.path.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")

    @property
    def part(self) -> str:
        """The part of the layout the module belongs to: `stores`, `errors`; '' for the root's own files."""
        first = self.name.partition(".")[0]
        return "" if first == "__main__" else first

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(_imports(self.tree, package=self._package(), lazy=False))

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        return tuple(node for node in ast.walk(self.tree) if isinstance(node, Function))

    def _package(self) -> str:
        """Return the package that a relative import starts from."""
        folder = Path(self.path).parent.as_posix()
        return "tasuki" if folder == "." else "tasuki." + folder.replace("/", ".")


def modules(folder: Path = PACKAGE, *, mentioning: Sequence[str] = ("",)) -> list[Module]:
    """Every Python file below the folder that parses; generated code is not ours to shape. Parsing takes longest: with
    `mentioning`, only those whose text has one of these.

    A file that does not parse is the business of `test_every_module_parses`, which would otherwise drown in repeats.
    """
    looked_at = (module for module in _found(folder) if any(word in module.text for word in mentioning))
    return [module for module in looked_at if not syntax_error(module)]


def syntax_errors(folder: Path = PACKAGE) -> list[str]:
    return [error for module in _found(folder) if (error := syntax_error(module))]


def syntax_error(module: Module) -> str | None:
    try:
        _ = module.tree
    except SyntaxError as error:
        return f"{module.path}:{error.lineno}: {error.msg}"
    return None


@cache
def touched(module: Module) -> tuple[tuple[str, int], ...]:
    """Every dotted name the module mentions, import aliases undone: `import os as o; o.environ` is `os.environ`."""
    aliases, found = _aliases(module.tree), []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            continue  # a name that is given, like a field called `input`, is not the builtin of that name
        if isinstance(node, ast.Attribute | ast.Name) and (dotted := _dotted(node)):
            first, dot, rest = dotted.partition(".")
            found.append((aliases.get(first, first) + dot + rest, node.lineno))
    return tuple(found)


def length(function: Function) -> int:
    """The lines of a function without its docstring: a verb explained well must not look long for it."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def _found(folder: Path) -> Iterator[Module]:
    return (_module(path, (folder / path).read_text(encoding="utf-8")) for path in _paths(folder))


@cache
def _module(path: str, text: str) -> Module:
    """Return one module for one text: every test looks at all of them, and parsing takes longest."""
    return Module(path, text)


def _paths(folder: Path) -> list[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*.py"))
    return sorted(path.as_posix() for path in paths if "migrations" not in path.parts and not path.stem.endswith("_pb2"))


def _imports(node: ast.AST, *, package: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            origin = _origin(child, package)
            yield from (Import(f"{origin}.{alias.name}", child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.Call) and (name := _dynamic_import(child)):
            yield Import(name, child.lineno, lazy)
        elif isinstance(child, ast.If) and (_dotted(child.test) or "").endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _imports(ast.Module([statement], []), package=package, lazy=True)
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), package=package, lazy=lazy)
            continue
        yield from _imports(child, package=package, lazy=lazy or isinstance(child, Function | ast.Lambda))


def _origin(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _dynamic_import(call: ast.Call) -> str | None:
    """`import_module("x.y")` and `__import__("x.y")` are imports too, where the name is written out."""
    called = (_dotted(call.func) or "").rpartition(".")[2]
    if called in {"import_module", "__import__"} and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return None


def _aliases(tree: ast.Module) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return aliases


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := _dotted(node.value)):
        return f"{owner}.{node.attr}"
    return None
