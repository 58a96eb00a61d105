"""The turn that is being written: everything that arrived since the last one went to the store, and who wants the answers.

A route remembers which slice of which list belongs to which message, so that a message with a thousand jobs costs one route.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import msgspec

from tasuki.core.protocol import Acceptance, BlobPut
from tasuki.core.store_messages import (
    BlobClaim,
    BlobPlace,
    HeldLease,
    LeaseRequest,
    Report,
    RequeueOrder,
    Submission,
    TokenRow,
    Turn,
)


class SubmitRoute(msgspec.Struct):
    """One SubmitJobs message."""

    conn: int
    msg_id: int
    start: int
    stop: int
    watch: bool
    rerun: bool
    count: int
    rejected: list[Acceptance]
    indexes: list[int] | None
    """Place in the message of each job of the slice; None: the slice is the whole message."""


class Slice(msgspec.Struct):
    """Items start:stop of a list came from this connection's message."""

    conn: int
    start: int
    stop: int
    msg_id: int = 0


class CheckRoute(msgspec.Struct):
    """Jobs to be read, because a caller must be allowed to see them first: then `action` happens."""

    conn: int
    msg_id: int
    start: int
    stop: int
    action: str
    reason: str = ""


class ActRoute(msgspec.Struct):
    """An order that was allowed: items start:stop of `cancel` or `requeue`."""

    conn: int
    msg_id: int
    start: int
    stop: int
    action: str


class LeaseRoute(msgspec.Struct):
    """One lease request and the credit that was set aside for it."""

    conn: int
    incarnation: str
    reserved: int
    fresh: bool = False
    """It was asked for what its turn submits, and nothing else was known to be ready for this worker."""


class HelloRoute(msgspec.Struct):
    """A peer that waits for its token to be looked up."""

    conn: int
    hello: Any


class BlobRoute(msgspec.Struct):
    """A peer that brings a blob."""

    conn: int
    put: BlobPut


class TokenRoute(msgspec.Struct):
    """An admin's token order, and what to answer when it is done."""

    conn: int
    msg_id: int
    verb: str
    index: int
    body: Any = None


class TurnBuilder:
    """Collects one Turn."""

    def __init__(self) -> None:
        self.finish: list[Report] = []
        self.fail: list[Report] = []
        self.start: list[HeldLease] = []
        self.renew: list[HeldLease] = []
        self.release: list[HeldLease] = []
        self.cancel: list[tuple[str, str, str]] = []
        self.requeue: list[RequeueOrder] = []
        self.submit: list[Submission] = []
        self.rerun: list[Submission] = []
        self.get: list[str] = []
        self.held: list[tuple[str, str]] = []
        self.token: list[str] = []
        self.add_token: list[TokenRow] = []
        self.revoke_token: list[tuple[str, str]] = []
        self.list_tokens = False
        self.place_blobs: list[BlobClaim] = []
        self.blobs_stored: list[BlobPlace] = []
        self.subjects: dict[str, None] = {}
        """Of the jobs that it submits. In their order: that of a set would be another in each process."""
        self.size_bytes = 0
        """Of the bodies and results in it."""
        self.finish_routes: list[Slice] = []
        self.fail_routes: list[Slice] = []
        self.start_routes: list[Slice] = []
        self.renew_routes: list[Slice] = []
        self.submit_routes: list[SubmitRoute] = []
        self.check_routes: list[CheckRoute] = []
        self.act_routes: list[ActRoute] = []
        self.held_routes: list[int] = []
        self.hello_routes: list[HelloRoute] = []
        self.token_routes: list[TokenRoute] = []
        self.place_routes: list[BlobRoute] = []
        self.stored_routes: list[BlobRoute] = []
        self.lease_routes: list[LeaseRoute] = []

    def __len__(self) -> int:
        """How much waits, items and messages; what backpressure looks at."""
        items: tuple[Sized, ...] = (
            self.finish,
            self.fail,
            self.start,
            self.renew,
            self.release,
            self.cancel,
            self.requeue,
            self.submit,
            self.rerun,
            self.get,
            self.held,
            self.token,
            self.token_routes,
            self.revoke_token,
            self.place_blobs,
            self.blobs_stored,
            self.submit_routes,
            self.check_routes,
            self.renew_routes,
        )
        return sum(map(len, items))

    def act(self, action: str, job_ids: Sequence[str], actor: str, reason: str) -> tuple[int, int]:
        """Cancel or requeue these jobs; start:stop of where that stands."""
        if action == "cancel":
            self.cancel += [(job_id, actor, reason) for job_id in job_ids]
            stop = len(self.cancel)
        else:
            self.requeue += [RequeueOrder(job_id, actor, reason) for job_id in job_ids]
            stop = len(self.requeue)
        return stop - len(job_ids), stop

    def leave_reads(self, limit: int) -> TurnBuilder:
        """A new draft with the reads past `limit` jobs: their results stand in memory until they are sent."""
        following, kept = TurnBuilder(), 0
        for place, route in enumerate(self.check_routes):
            kept += route.stop - route.start
            if place and kept > limit:
                cut = route.start
                following.check_routes, self.check_routes = self.check_routes[place:], self.check_routes[:place]
                following.get, self.get = self.get[cut:], self.get[:cut]
                for later in following.check_routes:
                    later.start -= cut
                    later.stop -= cut
                break
        return following

    def turn(self, leases: list[LeaseRequest]) -> Turn:
        """The finished draft."""
        return Turn(
            finish=self.finish,
            fail=self.fail,
            start=self.start,
            renew=self.renew,
            release=self.release,
            cancel=self.cancel,
            requeue=self.requeue,
            place_blobs=self.place_blobs,
            blobs_stored=self.blobs_stored,
            add_token=self.add_token,
            revoke_token=self.revoke_token,
            submit=self.submit,
            rerun=self.rerun,
            lease=leases,
            held=self.held,
            get=self.get,
            token=self.token,
            tokens=[None] if self.list_tokens else (),
            context=self,
        )
