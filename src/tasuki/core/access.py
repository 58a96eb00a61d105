"""Access rules: an identity and a job in, a yes or no out. Pure.

A token's scope is a list of patterns. One with `publish:` or `subscribe:` before it is for messages of publish/subscribe alone,
any other for jobs and for messages in both directions; a token without a scope may use all subjects.

A job's status, result, logs and cancel belong to its submitter, to admins, and to tokens whose scope covers its subject. A
worker sees the jobs that it holds, through the leases it was granted, and nothing else.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Collection, Sequence
from functools import lru_cache

import msgspec

from tasuki.core.job import check_name
from tasuki.core.store_messages import TokenRow
from tasuki.core.subject import DEFAULT_SUBJECT, assigned, check_job_pattern, check_pattern, intersects, matches
from tasuki.core.subscribers import INBOX
from tasuki.errors import Forbidden, InvalidInput, Unauthorized, quoted

TOKEN_PREFIXES = {"admin": "tsk_a_", "client": "tsk_c_", "worker": "tsk_w_", "enrol": "tsk_e_"}
ENROL_TOKEN_S = 15 * 60.0
UNAUTHENTICATED = "a token is needed: --token-file FILE or TASUKI_TOKEN (the server's own user finds it in the data folder)"
"""Message for a client that shows no token."""
WORKER_TOKEN_S = 7 * 86400.0  # of one that a worker got by registering; it asks for the next one in time
PUBLISH, SUBSCRIBE = "publish:", "subscribe:"  # before a pattern of a scope
NO_SUBJECT = " "  # a pattern that matches nothing: of a scope that has entries, none of which is for this right
INCARNATION_CHARS = 16  # hex digits: 64 bits, as many as other workers draw at their start


class PeerKind(enum.StrEnum):
    """Kinds of peers; all but NODE are kinds of tokens."""

    ADMIN = "admin"
    CLIENT = "client"
    WORKER = "worker"
    ENROL = "enrol"
    """Registers one worker, once."""
    NODE = "node"
    """A process of the server's own user on its unix socket: admin rights, and it may run as a worker too."""


class Identity(msgspec.Struct, frozen=True, gc=False):
    """The identity of a peer, from its token or its uid; never from the contents of a message."""

    kind: PeerKind
    name: str
    """Stored with every job as its submitter: `token:<id>` or `uid:<number>`."""
    scope: tuple[str, ...] = ()
    token_id: str = ""
    expires_at: float | None = None
    worker_id: str = ""
    """The only worker that it may be, or (an enrol token) register."""
    incarnation: str = ""
    """Incarnation of that worker at /calc: the same at all servers, secret, and kept when its token is exchanged."""

    @property
    def owner(self) -> str:
        """Owner of leases and of half-sent blobs. A worker stays the owner when its token is exchanged for another."""
        return f"worker:{self.worker_id}" if self.worker_id else self.name

    def expired(self, now_wall: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now_wall

    @property
    def job_scope(self) -> tuple[str, ...]:
        """Patterns of the jobs that it may submit, see or take; none: no limit."""
        return patterns_for("", self.scope)

    @property
    def admin(self) -> bool:
        return self.kind in (PeerKind.ADMIN, PeerKind.NODE)

    def may_see(self, submitter: str, subject: str) -> bool:
        """Return True if the peer may read the job's state, result and logs, cancel it, and retry it."""
        if self.admin or (self.kind is PeerKind.CLIENT and submitter == self.name):
            return True
        return self.kind is PeerKind.CLIENT and any(matches(pattern, subject) for pattern in self.job_scope)

    def check_submit(self, subject: str) -> None:
        if self.kind is PeerKind.WORKER:
            raise Forbidden("a worker token cannot submit jobs; make one with: tasuki token create --kind client")
        if self.kind is PeerKind.CLIENT and self.scope and not any(matches(pattern, subject) for pattern in self.job_scope):
            raise Forbidden(f"this token may not submit to subject {subject!r}; its scope is {', '.join(self.scope)}")

    def check_broadcast(self, target: str) -> None:
        """Refuse jobs for all workers of this pattern, unless the scope covers them all."""
        if self.kind is PeerKind.CLIENT and self.scope and not any(covers(pattern, target) for pattern in self.job_scope):
            raise Forbidden(f"this token may not submit to all of {target!r}; its scope is {', '.join(self.scope)}")

    def check_worker(self) -> None:
        if self.kind not in (PeerKind.WORKER, PeerKind.NODE):
            raise Forbidden(f"a token of kind {self.kind} cannot run jobs; make one with: tasuki token create --kind worker")

    def check_worker_id(self, worker_id: str) -> None:
        if self.worker_id and self.worker_id != worker_id:
            raise Forbidden(f"this token belongs to worker {self.worker_id!r}, not to {worker_id[:64]!r}")

    def check_patterns(self, patterns: tuple[str, ...]) -> None:
        """Refuse patterns outside the token's scope."""
        for pattern in patterns:
            wanted = check_job_pattern(pattern)
            if self.scope and not any(covers(allowed, wanted) for allowed in self.job_scope):
                raise Forbidden(f"this token may not subscribe to {pattern!r}; its scope is {', '.join(self.scope)}")

    def check_publish(self, subject: str) -> None:
        if self.admin or not self.scope or subject.startswith(INBOX):  # the caller waits there for the answer
            return
        if not any(matches(pattern, subject) for pattern in patterns_for(PUBLISH, self.scope)):
            raise Forbidden(f"this token may not publish to {quoted(subject)}; its scope is {', '.join(self.scope)}")

    def check_subscribe(self, pattern: str) -> None:
        check_pattern(pattern)
        if self.admin or not self.scope or pattern.startswith(INBOX):  # an inbox is named by a secret
            return
        if not any(covers(allowed, pattern) for allowed in patterns_for(SUBSCRIBE, self.scope)):
            raise Forbidden(
                f"this token may not subscribe to messages of {quoted(pattern)}; its scope is {', '.join(self.scope)}"
            )

    def check_put(self, target: str) -> None:
        """Refuse to change a cache for the workers of this pattern, unless the scope covers them all."""
        if not self.admin and not (self.kind is PeerKind.CLIENT and any(covers(pattern, target) for pattern in self.job_scope)):
            allowed = ", ".join(self.scope) or "empty"
            raise Forbidden(f"this token may not change caches for {target!r}; its scope is {allowed}, and must cover that")

    def may_read_cache(self, owner: str, target: str) -> bool:
        """Return True if the peer may see and use a file that this owner put for workers of this pattern."""
        if self.admin or (self.kind is PeerKind.CLIENT and owner == self.name):
            return True
        if self.kind is PeerKind.WORKER and not self.scope:
            return True
        return any(intersects(pattern, target) for pattern in self.job_scope)

    def check_admin(self, what: str) -> None:
        if not self.admin:
            raise Forbidden(f"{what} needs an admin token; this token is of kind {self.kind}")


def check_worker_id(worker_id: str, apps: Collection[str]) -> None:
    """Refuse an id that cannot be the last token of a subject, or that ends the subject of jobs for any worker."""
    check_name(worker_id, "worker_id")
    if "." in worker_id:
        raise InvalidInput(f"worker_id {worker_id!r} may not contain a dot: it can be the last token of a subject")
    if worker_id == DEFAULT_SUBJECT.rpartition(".")[2] or worker_id in apps:
        raise InvalidInput(f"worker_id {worker_id!r} ends the subject of jobs that are for any worker; choose another one")


def in_scope(scope: Sequence[str], subject: str) -> bool:
    """Return True if a worker with this scope may take jobs of the subject; an empty scope is for all."""
    return not scope or any(matches(pattern, subject) for pattern in patterns_for("", tuple(scope)))


@lru_cache(1024)
def patterns_for(right: str, scope: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns of a scope for PUBLISH or SUBSCRIBE, or with "" for jobs; an empty scope has none and no limit."""
    other = tuple(prefix for prefix in (PUBLISH, SUBSCRIBE) if prefix != right)
    found = tuple(entry.removeprefix(right) for entry in scope if not entry.startswith(other))
    if not right:
        found = tuple(map(assigned, found))
    return found or ((NO_SUBJECT,) if scope else ())


def check_scope(scope: Sequence[str]) -> None:
    """Refuse an entry of a new token's scope that is no pattern, with or without a right before it."""
    for entry in scope:
        check_pattern(entry.removeprefix(PUBLISH).removeprefix(SUBSCRIBE))


def covers(wide: str, narrow: str) -> bool:
    """Return True if `wide` matches every subject that `narrow` matches."""
    wide_parts, narrow_parts = wide.split("."), narrow.split(".")
    for place, part in enumerate(wide_parts):
        if part == ">":
            return place < len(narrow_parts)
        if place >= len(narrow_parts) or narrow_parts[place] == ">":
            return False
        if part != "*" and part != narrow_parts[place]:
            return False
    return len(wide_parts) == len(narrow_parts)


def token_sha256(secret: str) -> str:
    """Return the hash by which a token is stored and looked up; 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def identify(token: TokenRow | None, now_wall: float) -> Identity:
    """Return the identity of a stored token, or raise Unauthorized. Unknown and wrong tokens get the same message."""
    if token is None:
        raise Unauthorized("the token is not known here; list the valid ones with: tasuki token list")
    if token.revoked_at is not None:
        raise Unauthorized(f"token {token.token_id} was revoked")
    if token.expires_at is not None and token.expires_at <= now_wall:
        raise Unauthorized(f"token {token.token_id} has expired")
    if token.kind not in TOKEN_PREFIXES:
        raise Unauthorized(f"token {token.token_id} has the unknown kind {token.kind!r}; kinds are {', '.join(TOKEN_PREFIXES)}")
    name = f"token:{token.token_id}"
    incarnation = token.incarnation
    if token.worker_id and not incarnation:
        incarnation = token_sha256(f"incarnation {token.sha256}")[:INCARNATION_CHARS]
    return Identity(PeerKind(token.kind), name, token.scope, token.token_id, token.expires_at, token.worker_id, incarnation)
