"""Configuration of a dispatcher."""

from __future__ import annotations

import enum
import ssl

import msgspec

from tasuki.core.address import Address
from tasuki.core.failover.events import LIMIT_S, SILENT_S
from tasuki.core.failover.nodes import DEFAULT_RULES, BreakerRules

UPLOAD_MAX_BYTES = 64 * 1000**3
KEEP_INPUTS_DAYS = 7.0


class Mode(enum.StrEnum):
    """Way of a job to its node: passed through, or by a redirect of the client."""

    PROXY = "proxy"
    REDIRECT = "redirect"


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one dispatcher."""

    agents: tuple[Address, ...]
    mode: Mode = Mode.PROXY
    tokens: tuple[str, ...] = ()
    """Tokens that are accepted from clients."""
    agent_token: str = ""
    """Token for requests to agents; sent to nobody else."""
    agent_tls: ssl.SSLContext | None = None
    inputs: str | None = None
    max_upload_bytes: int = UPLOAD_MAX_BYTES
    """Limit of uploads that are kept in the store; agents limit those that are passed through."""
    keep_inputs_days: float = KEEP_INPUTS_DAYS
    """Days after their last use for which inputs are kept; 0: for ever."""
    limit_s: float = LIMIT_S
    """Time in which a node must answer."""
    silent_s: float = SILENT_S
    """Time without a sign of life after which a node that runs a job counts as dead."""
    rules: BreakerRules = DEFAULT_RULES
