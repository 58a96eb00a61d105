"""What a store does to free texts from outside. Pure."""

from __future__ import annotations


def storable(text: str) -> str:
    """The text as every database takes it: PostgreSQL refuses NUL."""
    return text.replace("\0", "\ufffd") if "\0" in text else text
