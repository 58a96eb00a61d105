"""Exit codes: one for each kind of error, all of them in the table."""

import pytest

from tasuki.cli import exits
from tasuki.errors import BY_CODE, Conflict, TasukiError


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("NOT_FOUND", 3),
        ("UNAUTHORIZED", 4),
        ("FORBIDDEN", 4),
        ("UNAVAILABLE", 5),
        ("DISK_FULL", 5),
        ("OVERLOADED", 5),
        ("DEADLINE", 5),
        ("CONFLICT", 6),
        ("INVALID", 2),
        ("TOO_LARGE", 2),
        ("CONFIG", 2),
        ("JOB_FAILED", 1),
        ("CORRUPT", 1),
        ("ERROR", 1),
    ],
)
def test_an_error_has_its_exit_code(code: str, expected: int) -> None:
    kind = BY_CODE[code]
    error: TasukiError = Conflict("a", ["args"]) if kind is Conflict else kind("what was wrong")

    assert exits.exit_code(error) == expected


def test_every_code_is_explained_in_the_table() -> None:
    used = {value for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}

    assert used == set(exits.MEANINGS)
