"""What a server tells the others of itself: plain data that travels through the coordination as msgpack."""

from __future__ import annotations

import msgspec

from tasuki.core.job import OnDisconnect
from tasuki.core.store_messages import Takes


class WorkerInfo(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A worker as the other servers know it, a second ago."""

    worker_id: str
    incarnation: str
    patterns: tuple[str, ...] = ()
    host: str = ""
    slots: int = 1
    takes: Takes = Takes.ANY
    credit: int = 0
    running: int = 0
    address: str = ""
    on_disconnect: OnDisconnect = OnDisconnect.STOP

    def view(self, server_id: str) -> dict[str, object]:
        """For people."""
        return {
            "server_id": server_id,
            "worker_id": self.worker_id,
            "incarnation": self.incarnation,
            "host": self.host,
            "patterns": list(self.patterns),
            "credit": self.credit,
            "running": self.running,
            "slots": self.slots,
            "takes": str(self.takes),
            "address": self.address,
            "on_disconnect": str(self.on_disconnect),
        }


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One live server."""

    server_id: str
    addresses: tuple[str, ...] = ()
    """Where peers can reach it."""
    workers: tuple[WorkerInfo, ...] = ()
    epoch: int = 0
    """Under which it leads; 0: it does not."""
    blob_problem: str = ""
    """Why the leader takes no new blobs; then nobody does."""
