"""What a dispatcher is told at its start."""

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
    """How a job gets to its node."""

    PROXY = "proxy"
    REDIRECT = "redirect"


class DispatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatcher."""

    agents: tuple[Address, ...]
    mode: Mode = Mode.PROXY
    tokens: tuple[str, ...] = ()
    """Who may come in."""
    agent_token: str = ""
    """With which the agents are asked. It is sent to nobody else."""
    agent_tls: ssl.SSLContext | None = None
    inputs: str | None = None
    max_upload_bytes: int = UPLOAD_MAX_BYTES
    """Of what is kept in the store; what is passed through is limited by the agents."""
    keep_inputs_days: float = KEEP_INPUTS_DAYS
    """After their last use; 0: for ever."""
    limit_s: float = LIMIT_S
    """How long a node may take to answer."""
    silent_s: float = SILENT_S
    """A node that works on a job and says nothing for so long is as good as dead."""
    rules: BreakerRules = DEFAULT_RULES
