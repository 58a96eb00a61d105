"""Settings of an agent: its configuration, its token file, and defaults from the size of the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tasuki.config import TOKEN_MAX_CHARS, read_secret
from tasuki.core.failover.agent_protocol import TIMEOUT_S, default_slots
from tasuki.errors import ConfigError
from tasuki.worker.execs import Exec
from tasuki.worker.logs import DEFAULT_CAPS, LogCaps

TOKENS_MAX = 1_000
TOKEN_MIN_CHARS = 16  # 64 bits if they are hex digits: nobody guesses that over a network
KEEP_DAYS = 7.0


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one agent."""

    data: Path
    node: str
    execs: Mapping[str, Exec]
    default_exec: str | None = None
    slots: int = 1
    timeout_s: float = TIMEOUT_S
    max_upload_bytes: int | None = None
    """None: a quarter of the space that is free when the upload comes."""
    keep_days: float = KEEP_DAYS
    tokens: tuple[str, ...] = ()
    log_caps: LogCaps = DEFAULT_CAPS


def read_tokens(path: str) -> tuple[str, ...]:
    """Return the tokens of a file, one on each line; empty lines and lines that begin with # are skipped."""
    try:
        lines = read_secret(path, "the token file").decode().splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path!r} cannot be read: {error}") from None
    tokens = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not tokens or len(tokens) > TOKENS_MAX:
        raise ConfigError(f"the token file {path!r} must have 1 to {TOKENS_MAX} tokens, one on each line; it has {len(tokens)}")
    for number, token in enumerate(tokens, 1):
        check_token(token, f"token {number} of the token file {path!r}")
    return tokens


def check_token(token: str, what: str) -> str:
    """Return the token if it may let peers in, else raise ConfigError: the shortest that nobody can guess has 16 characters."""
    if not TOKEN_MIN_CHARS <= len(token) <= TOKEN_MAX_CHARS or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{what} must be printable ASCII without spaces, of {TOKEN_MIN_CHARS} to {TOKEN_MAX_CHARS} characters; it has "
            f"{len(token)}. Make one with: openssl rand -hex 32"
        )
    return token


def slots_of_this_machine() -> int:
    """Return the default number of slots: by the cores that this process may use, and by memory."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return default_slots(len(os.sched_getaffinity(0)), memory_bytes)


def choose_default(execs: Mapping[str, Exec], named: str | None) -> str | None:
    """Return the exec for requests that name none: --default-exec, else the only one there is."""
    if named is not None and named not in execs:
        there = ", ".join(sorted(execs)) or "there are none"
        raise ConfigError(f"--default-exec must be one of the execs ({there}), got {named[:64]!r}")
    return named or (next(iter(execs)) if len(execs) == 1 else None)
