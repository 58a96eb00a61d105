"""The SQL store inside a user's own Django project: verbs join the `transaction.atomic()` that the calling thread is in.

There the connection, its settings and its errors' consequences are the project's: nothing is tuned, nothing is tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasuki.errors import Unavailable

if TYPE_CHECKING:
    from django.db import transaction
    from django.db.backends.base.base import BaseDatabaseWrapper


class InDjango:
    """Transactions by Django's own means; what else a `Database` needs, the vendors add."""

    def __init__(self, alias: str) -> None:
        from django.db import transaction

        self._alias = alias
        self._atomic = transaction.atomic
        self._open: list[transaction.Atomic] = []

    def wrapper(self) -> BaseDatabaseWrapper:
        """Django's connection of the calling thread, connected."""
        from django.db import connections

        wrapper = connections[self._alias]
        wrapper.ensure_connection()
        return wrapper

    def begin(self, *, lasting: bool = True) -> None:
        """Inside the user's transaction a savepoint, so that a verb that fails leaves nothing behind; else one of our own."""
        block = self._atomic(using=self._alias)
        block.__enter__()
        self._open.append(block)

    def commit(self) -> None:
        self._open.pop().__exit__(None, None, None)

    def rollback(self) -> None:
        if self._open:
            error = Unavailable("rolled back")
            self._open.pop().__exit__(type(error), error, None)

    def close(self) -> None:
        """The connection is Django's."""
