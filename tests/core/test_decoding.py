"""Types that several threads decode: msgspec has them noted while their modules are imported, for two first uses may meet."""

import ast
import subprocess
import sys
from collections.abc import Iterator

from tests.shape.source import modules

RACE = """
import sys, threading
import msgspec
from tasuki.core.decoding import decodable

sys.setswitchinterval(1e-6)
for _ in range(500):
    inner = msgspec.defstruct("Inner", [(f"a{n}", int) for n in range(20)])
    kind = decodable(msgspec.defstruct("Kind", [(f"b{n}", list[inner]) for n in range(20)]))
    data, ready = msgspec.json.encode({f"b{n}": [{f"a{m}": m for m in range(20)}] for n in range(20)}), threading.Barrier(3)
    threads = [threading.Thread(target=lambda: (ready.wait(), msgspec.json.decode(data, type=kind))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_the_first_uses_of_a_type_in_three_threads_crash_nothing() -> None:
    assert subprocess.run([sys.executable, "-c", RACE], timeout=60, check=False).returncode == 0


def _asked_for(call: ast.Call) -> ast.expr | None:
    """Return the type that a call of msgspec decodes to."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "convert" and len(call.args) > 1:
        return call.args[1]
    return next((word.value for word in call.keywords if word.arg == "type"), None) if name == "decode" else None


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (one for one in ast.walk(node) if isinstance(one, ast.Call))


def _names(node: ast.AST | None) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if node is not None else set()


def test_types_that_are_decoded_by_name_are_decodable() -> None:
    found = [module for module in modules() if module.part != "testing"]
    classes = {
        node.name: any(_names(one) == {"decodable"} for one in node.decorator_list)
        for module in found
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and any("Struct" in ast.unparse(base) for base in node.bases)
    }
    functions = [function for module in found for function in module.functions]
    passed_on = {one.name for one in functions if any("kind" in _names(_asked_for(call)) for call in _calls(one))}
    asked: dict[str, str] = {}
    for module in found:
        for call in _calls(module.tree):
            names = _names(_asked_for(call))
            if ast.unparse(call.func).rpartition(".")[2] in passed_on:
                names |= {one.id for one in call.args if isinstance(one, ast.Name)}
            asked |= dict.fromkeys(names & classes.keys(), module.path)

    assert passed_on >= {"read_answer", "_read", "_ask"}
    assert len(asked) > 20
    assert {name: path for name, path in asked.items() if not classes[name]} == {}
