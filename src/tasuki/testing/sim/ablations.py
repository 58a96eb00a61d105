"""Safeguards, each of which can be taken away for the time of a run: the simulator must notice that it is gone.

    found = hunt(ABLATIONS["epoch_fence"], seeds_max=300)      # Found(seed=3, tries=4, violation=I8: …)
    python -m tasuki.testing.sim.ablations                     # a table of all

A simulator that finds nothing shows nothing, unless it is known what it would have found. Production code has no switch for any
of this: for the time of a `with` block a function, a constant or a statement is replaced from outside, and then put back. An
ablation that no longer finds what it replaces is an error.

`UNSEEN` are those that are not missed: something else holds the promise, and they spare time or losses. Not among these is the
condition of `reap` that is repeated in its write, nor the lock on rows that are read to be judged: only where several writers
commit at the same time do they matter, and neither of the stores here has those.

The table is put together here; what is taken away from the store is in `ablations_store.py` and `ablations_orders.py`, from the
machines of server, worker, client and election in `ablations_machines.py`. How a replacement is made is in `seams.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from tasuki.testing.sim.ablations_machines import MACHINES, UNSEEN
from tasuki.testing.sim.ablations_orders import ORDERS
from tasuki.testing.sim.ablations_store import STORE
from tasuki.testing.sim.checker import Violation
from tasuki.testing.sim.patches import Ablation
from tasuki.testing.sim.run import SeedOutcome, check_seed

__all__ = ["ABLATIONS", "UNSEEN", "Ablation", "AblationFinding", "hunt", "table"]

ABLATIONS: dict[str, Ablation] = {ablation.name: ablation for ablation in (*STORE, *ORDERS, *MACHINES)}

SEEDS_MAX = 300


class AblationFinding(msgspec.Struct, frozen=True):
    """The first seed that showed it, and how many were tried."""

    seed: int
    tries: int
    violation: Violation


def hunt(ablation: Ablation, seeds_max: int = SEEDS_MAX, *, store: str = "memory", first_seed: int = 0) -> AblationFinding | None:
    """Run seed after seed without the safeguard until the checker finds something; None: it did not."""
    options = replace(ablation.options, store=store)
    with ablation.switch_off():
        for tries, seed in enumerate(range(first_seed, first_seed + seeds_max), 1):
            violation = _broken(check_seed(seed, options))
            if violation is not None:
                return AblationFinding(seed, tries, violation)
    return None


def _broken(outcome: SeedOutcome) -> Violation | None:
    if outcome.violations:
        return outcome.violations[0]
    return Violation("liveness", outcome.problem, outcome.virtual_s) if outcome.problem else None


def table(found: Mapping[str, Mapping[str, AblationFinding | None]]) -> str:
    """For people: for each ablation and store after how many seeds it was found, and what was broken; then those unseen."""
    lines = ["| Without | the promise that | Seeds (memory) | Seeds (SQLite) | Broken |", "|---|---|---|---|---|"]
    for name, hits in found.items():
        seeds = [_seeds(hits[store]) if store in hits else "" for store in ("memory", "sqlite")]
        broken = dict.fromkeys(hit.violation.invariant for hit in hits.values() if hit is not None)
        lines.append(f"| `{name}` | {ABLATIONS[name].what} | {' | '.join(seeds)} | {', '.join(broken)} |")
    lines += ["", "| Without | | Nothing is broken, since |", "|---|---|---|"]
    lines += [f"| `{ablation.name}` | {ablation.what} | {ablation.why} |" for ablation in UNSEEN]
    return "\n".join(lines)


def _seeds(found: AblationFinding | None) -> str:
    return str(found.tries) if found is not None else "not found"


def main() -> None:
    """The table for docs/simulator.md."""
    found = {
        name: {store: hunt(ablation, store=store, first_seed=1) for store in ablation.stores}
        for name, ablation in ABLATIONS.items()
    }
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
