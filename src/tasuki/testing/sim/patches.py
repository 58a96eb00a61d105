"""How a safeguard is taken away from outside: something of the production code is replaced, and put back. Touches nothing else.

What is replaced must be there: a name that is gone, or a statement that reads otherwise by now, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import msgspec

from tasuki.testing.sim.options import SimOptions


class Seam(Protocol):
    """One thing that can be replaced for a while."""

    def open(self) -> AbstractContextManager[None]: ...


class Instead(msgspec.Struct, frozen=True):
    """`make` is given a function, class attribute or constant as it is, and says what stands in its place."""

    owner: Any
    """The class or module that defines it; for a name that was imported, whoever imported it."""
    name: str
    make: Callable[[Any], Any]

    @contextmanager
    def open(self) -> Iterator[None]:
        before = vars(self.owner)[self.name]
        setattr(self.owner, self.name, self.make(before))
        try:
            yield
        finally:
            setattr(self.owner, self.name, before)


class Reworded(msgspec.Struct, frozen=True):
    """A statement of SQLite's without some of its words, or with others for them."""

    statement: str
    words: str
    instead: str = ""

    @contextmanager
    def open(self) -> Iterator[None]:
        from tasuki.stores.sql.database import load_statements

        statements = load_statements("sqlite")
        texts: dict[Any, str] = statements.one
        keys: list[Any] = [self.statement]
        if self.statement in statements.many:
            texts = statements.many[self.statement]
            keys = list(texts)
        before = {key: texts[key] for key in keys}
        if any(self.words not in text for text in before.values()):
            raise LookupError(f"statement {self.statement!r} does not say {self.words!r} any more; say here what it says instead")
        texts.update({key: text.replace(self.words, self.instead) for key, text in before.items()})
        try:
            yield
        finally:
            texts.update(before)


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    """One safeguard, and what breaks without it."""

    name: str
    what: str
    """The safeguard, for people."""
    invariants: tuple[str, ...] = ()
    """What the checker may find broken first."""
    seams: tuple[Seam, ...]
    options: SimOptions = SimOptions()
    """What makes it likely that somebody needed the safeguard."""
    stores: tuple[str, ...] = ("memory",)
    """Where it is tried: on each store whose own code has it."""
    why: str = ""
    """Why nothing breaks without it: something else holds the promise, and this one spares time or losses."""

    @contextmanager
    def switch_off(self) -> Iterator[None]:
        with ExitStack() as stack:
            for seam in self.seams:
                stack.enter_context(seam.open())
            yield
