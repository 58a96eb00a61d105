"""What can be chosen of a simulated world, and what a seed draws of what was left open."""

from __future__ import annotations

import random

import msgspec
from msgspec.structs import replace


class SimOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: the seed decides."""

    servers: int | None = None
    workers: int | None = None
    clients: int | None = None
    jobs: int | None = None
    store: str = "memory"
    """memory or sqlite"""
    tokens: bool | None = None
    """Peers show tokens, which the store looks up; else all are the server's own user."""
    wire: bool | None = None
    """Messages pass through the wire's bytes."""
    kinds: tuple[str, ...] | None = None
    """Kinds of fault (`faults.KINDS`) that the seed chooses from for each."""
    faults: int | None = None
    """How many are planned."""
    chaos_s: float = 18.0
    """How long faults and load last."""
    heal_limit_s: float = 150.0
    """By when, after that, everything must have come to its end."""
    rest_s: float = 2.0
    """How long a world that has come to its end is watched on: nothing must happen any more."""
    tick_s: float = 0.25
    """How often a process looks at its timers. The real ones do every 0.05 to 0.1 s."""
    lease_ttl_s: float | None = None
    lock_ttl_s: float | None = None
    retention_s: float | None = None
    """How long finished jobs are kept."""
    attempts_scale: float = 1.0
    """How many times as long attempts take."""
    latency_s: float | None = None
    """Of one message on a network that is well; drawn anew for each, up to four times that."""

    def text(self) -> str:
        """For people who want the same run again."""
        return " ".join(f"{name}={_shown(getattr(self, name))}" for name in self.__struct_fields__)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def derived(seed: int, options: SimOptions, kinds: tuple[str, ...]) -> SimOptions:
    """The options with everything that was left open drawn from the seed; `kinds` are all that there are."""
    chance = random.Random(f"tasuki {seed} options")  # noqa: S311 - it must be the same again
    swarm = [kind for kind in kinds if chance.random() < 0.4]
    swarm += [kind for kind in chance.sample(kinds, min(4, len(kinds))) if kind not in swarm]
    servers = options.servers or chance.choice((1, 2, 2, 3, 3))
    drawn = {
        "servers": servers,
        "workers": chance.randint(3, 5),
        "clients": chance.randint(2, 3),
        "jobs": chance.randint(88, 100) if servers == 1 else chance.randint(52, 62),
        "tokens": chance.random() < 0.4,
        "wire": chance.random() < 0.1,
        "kinds": tuple(sorted(swarm, key=kinds.index)),
        "faults": chance.randint(14, 24),
        "lease_ttl_s": chance.choice((2.0, 3.0, 4.0)),
        "lock_ttl_s": chance.choice((2.0, 3.0, 5.0)),
        "latency_s": chance.choice((0.0005, 0.002, 0.01)),
        "retention_s": chance.choice((86_400.0,) * 6 + (8.0,)),
    }
    return replace(options, **{name: value for name, value in drawn.items() if getattr(options, name) is None})
