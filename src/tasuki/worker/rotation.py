"""A worker's token is exchanged for the next one in good time, while its jobs run. Hears what its machine hears, before it.

Theory of operation. The secret of the next token is made here and saved as `pending` before the server is told its hash. From
then on the server knows either the one or the other, and whatever is lost on the way (the request, the answer, this process), the
file has both: a token that is refused is followed by the others that may be good, and only when all are refused is the worker
told that it may not come in. The one that was let in is kept.

The server ends connections whose token was exchanged. So the worker hangs up by itself, and comes back with the new one; its
leases and its jobs are not touched by that.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tasuki.clocks import now
from tasuki.core.access import TOKEN_PREFIXES, PeerKind, token_sha256
from tasuki.core.backoff import Backoff
from tasuki.core.machine import Closed, Opened, Received
from tasuki.core.protocol import ErrorMessage, Message, Reply, Welcome
from tasuki.errors import InvalidInput, TasukiError, Unauthorized, Unavailable, from_wire
from tasuki.worker.credentials import Credential, CredentialFile, CredentialToken

ROTATE = "worker.rotate"
DUE_AT_LEFT = 1 / 3  # of its life
JITTER = 0.1  # of its life, so that workers that were enrolled together do not rotate together
ANSWER_S = 40.0  # the server gives its store 30
RETRY_FIRST = 1 / 10_000  # of its life: a minute of a week
RETRY_MAX = 1 / 200
RETRY_MIN_S = 0.05
LOOK_S = 600.0  # how long to sleep at most: the clock may be set meanwhile

logger = logging.getLogger("tasuki.worker")


class Rotation:
    """`ask` sends a request on the worker's connection and gives its msg_id, `use` is told the token for the next Hello."""

    def __init__(
        self,
        seat: CredentialFile,
        *,
        ask: Callable[[str, dict[str, str]], int],
        use: Callable[[str], None],
        hang_up: Callable[[TasukiError], None],
        jitter: Callable[[], float],
    ) -> None:
        assert seat.credential is not None
        self._seat, self._kept = seat, seat.credential
        self._ask, self._use, self._hang_up, self._jitter = ask, use, hang_up, jitter
        self._spread = jitter()
        self._shown = self._chosen = self._kept.token
        """Which token this connection came with, and which one the next will."""
        self._refused: dict[str, ErrorMessage] = {}
        """By token_id, since we were let in last."""
        self._online = False
        self._unsaved = False
        self._taken = False
        """The server has a token like the one that we made."""
        self._asked = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._backoff: Backoff | None = None
        self._retry_at = 0.0
        self._woken = asyncio.Event()

    @property
    def token(self) -> str:
        """The one for the next Hello."""
        return self._chosen.secret

    # ------------------------------------------------------------------------------------------------ what is heard

    def heard(self, event: Opened | Received | Closed) -> Opened | Received | Closed | None:
        """What the machine is to hear of it; None: it is no business of the machine's."""
        if type(event) is Opened:
            self._shown = self._chosen
        elif type(event) is Closed:
            self._online = False
            self._end(Unavailable(f"the connection was lost: {event.reason}"))
        elif type(event) is Received:
            message = self._told(event.message)
            return None if message is None else Received(event.conn, message)
        return event

    def _told(self, message: Message) -> Message | None:
        match message:
            case Welcome():
                self._welcomed()
            case Reply() if message.corr_id == self._asked and self._answer is not None:
                if not self._answer.done():
                    self._answer.set_result(message.body)
                return None
            case ErrorMessage() if message.corr_id and message.corr_id == self._asked:
                self._end(from_wire(message.code, message.message, message.details))
                return None
            case ErrorMessage() if not message.corr_id and message.code == Unauthorized.code:
                return self._not_let_in(message)
        return message

    def _end(self, error: TasukiError) -> None:
        """What was asked will not be answered, or with this."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def _welcomed(self) -> None:
        self._online = True
        self._refused.clear()
        kept = self._kept
        if self._shown.token_id != kept.token.token_id:
            # Its answer was lost, but it was done. Or the other way round: the server was restored from a backup.
            logger.info("token %s is the one that is good", self._shown.token_id)
            kept = replace(kept, token=self._shown, pending=None)
        elif self._taken:  # so it was not ours that stood in our way
            kept = replace(kept, pending=None)
        self._taken = False
        self._keep(replace(kept, previous=None))
        self._woken.set()

    def _not_let_in(self, error: ErrorMessage) -> ErrorMessage | None:
        """None while there is another token to try: the server hangs up, and the next Hello shows it. Then, why our own was
        refused: what is said of a token that the server may never have seen would lead nobody on."""
        self._refused[self._shown.token_id] = error
        for token in self._kept.candidates:
            if token.token_id not in self._refused:
                logger.info("token %s is refused (%s); %s is tried", self._shown.token_id, error.message, token.token_id)
                self._choose(token)
                return None
        return self._refused[self._kept.token.token_id]

    def _choose(self, token: CredentialToken) -> None:
        self._chosen = token
        self._use(token.secret)

    def _keep(self, credential: Credential) -> None:
        if credential != self._kept:
            self._kept, self._unsaved = credential, True

    # ------------------------------------------------------------------------------------------------ what is done

    async def run(self) -> None:
        """For as long as the worker lives. The only one who writes the file."""
        while True:
            self._woken.clear()
            if self._unsaved:
                await self._save("the token that is in use")
            if self._online and self._wait_s() <= 0:
                await self._try_to_rotate()
                continue
            try:
                await asyncio.wait_for(self._woken.wait(), min(LOOK_S, self._wait_s()) if self._online else LOOK_S)
            except TimeoutError:
                continue

    def _wait_s(self) -> float:
        """Until it is time to rotate."""
        at = now()
        token = self._kept.token
        due_s = token.left_s(at.wall) - token.ttl_s * (DUE_AT_LEFT - JITTER * self._spread)
        if self._kept.pending is not None:  # it was begun, and has to come to an end
            due_s = 0.0
        return max(due_s, self._retry_at - at.monotonic)

    async def _save(self, what: str) -> bool:
        credential = self._kept
        try:
            await asyncio.to_thread(self._seat.save, credential)
        except OSError as error:
            logger.warning("%s cannot be saved in %s: %s", what, self._seat.path, error)
            return False
        self._unsaved = credential != self._kept
        return True

    async def _try_to_rotate(self) -> None:
        try:
            await self._rotate()
        except TasukiError as error:
            if isinstance(error, InvalidInput):  # most likely we asked before; the next Hello shows which token is good
                self._taken = True
                self._hang_up(error)
            life_s = self._kept.token.ttl_s
            if self._backoff is None:
                self._backoff = Backoff(max(RETRY_MIN_S, life_s * RETRY_FIRST), life_s * RETRY_MAX, self._jitter)
            wait_s = self._backoff.next_s()
            self._retry_at = now().monotonic + wait_s
            logger.warning("the token was not rotated, tried again in %.0f s: %s", wait_s, error.message)

    async def _rotate(self) -> None:
        fresh = self._kept.pending
        if fresh is None:
            fresh = new_token(self._kept.token.ttl_s)
            self._kept = replace(self._kept, pending=fresh)
            if not await self._save("the next token"):  # what is not on disk must not be told to the server
                self._kept = replace(self._kept, pending=None)
                raise Unavailable("there is no room for the next token")
        if not self._online:
            raise Unavailable("the connection was lost")
        self._answer = asyncio.get_running_loop().create_future()
        params = {"token_id": fresh.token_id, "sha256": token_sha256(fresh.secret)}
        asked_at = now().wall
        self._asked = self._ask(ROTATE, params)
        try:
            told = await asyncio.wait_for(self._answer, ANSWER_S)
        except TimeoutError:
            raise Unavailable(f"the server has not answered within {ANSWER_S:g} s") from None
        finally:
            self._answer, self._asked = None, 0
        fresh = replace(fresh, issued_at=asked_at, expires_at=asked_at + float(told.get("ttl_s", fresh.ttl_s)))
        old = self._kept.token
        self._keep(replace(self._kept, token=fresh, pending=None, previous=old))
        await self._save("the new token")
        self._backoff, self._retry_at = None, 0.0
        self._choose(fresh)
        logger.info("the token was rotated: %s takes the place of %s", fresh.token_id, old.token_id)
        if self._shown.token_id == old.token_id:
            self._hang_up(Unavailable("the token was rotated, and is shown to the server"))


def new_token(ttl_s: float) -> CredentialToken:
    """A secret of ours, of which the server gets the hash alone."""
    secret = TOKEN_PREFIXES[PeerKind.WORKER] + secrets.token_urlsafe(32)
    issued_at = now().wall
    return CredentialToken(secret=secret, token_id=secrets.token_hex(6), issued_at=issued_at, expires_at=issued_at + ttl_s)
