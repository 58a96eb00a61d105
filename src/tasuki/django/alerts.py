"""Alerts: webhooks on failures and dead letters, schedules that are late, and a missing leader: of a project
(`TASUKI["alerts"]`), and of servers on a SQL store (`tasuki server --webhook`).

What happened is read from the rows that have it anyway (incidents of jobs, notes on definitions), and becomes a row of Alert,
whose key makes it once, whichever nodes look. So an alert outlives the node that saw the failure. Any node sends: it moves
`next_at` of a row ahead, which one node can do, and ends it when the receiver answered 2xx. A node that dies in between leaves it
to the next one: receivers get an alert at least once. A send ends SEND_S after the row was moved ahead, before another node may
take it. What no receiver took within KEEP_S is given up.

Incidents are looked at again for SETTLED_S, because a transaction with a lower id may be committed after one with a higher.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.db import connections, models

from tasuki.core.backoff import Backoff
from tasuki.django import standalone
from tasuki.django.conf import AlertSettings, AlertTarget
from tasuki.django.fields import database_time
from tasuki.django.models import Alert, DefinitionState, Incident, ScopeEpoch, ScopeLease
from tasuki.errors import Forbidden, InvalidInput
from tasuki.server.assembly import open_scheduler_coordination

logger = logging.getLogger("tasuki.django")
INTERVAL_S = 2.0
SETTLED_S = 60.0
LOOK_MAX = 500  # incidents of one look
SEND_MAX = 20  # alerts of one step
SEND_S = 20.0  # for one request, whatever the receiver does
CLAIM_S = 30.0  # a node that took an alert and died leaves it to others after so long
STATUS_MAX_BYTES = 1024
KEEP_S = 7 * 86_400.0
SCOPE = "alerts"
"""Row of ScopeEpoch whose epoch is the id of the last incident that is settled."""
BACKOFF = Backoff(5.0, 3_600.0)
SIGNATURE = "Tasuki-Signature"
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are the IPv4 address
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_KINDS = {"failed": "failure", "dead_lettered": "dead_letter"}


def wanted(settings: AlertSettings) -> bool:
    """Return whether there is a receiver."""
    return settings.everything is not None or bool(settings.definitions)


class Alerts:
    """Makes and sends alerts, on the connection of the calling thread. `coordination`: the Redis in which leaders are elected."""

    def __init__(self, alias: str, settings: AlertSettings, coordination: str = "") -> None:
        self._alias, self._settings, self._coordination = alias, settings, coordination
        self.closing = threading.Event()
        """Set: no further alert is sent in this step."""

    def step(self) -> None:
        """Make the alerts of what happened since the last look, and send those that are due."""
        now = database_time(connections[self._alias]).timestamp()
        self._add([*self._of_incidents(now), *self._of_late_definitions(now)])
        self._settle(now)
        self._send_due(now)
        Alert.objects.using(self._alias).filter(next_at=None, created_at__lt=now - KEEP_S).delete()
        self._add(self._of_missing_leader(now))  # last: a Redis that is away keeps nothing else from its receiver

    def _add(self, made: Iterable[Alert]) -> None:
        Alert.objects.using(self._alias).bulk_create(made, ignore_conflicts=True)

    def _make(self, kind: str, key: str, definition: str, now: float, body: dict[str, Any]) -> Iterator[Alert]:
        targets = {definition: self._settings.definitions.get(definition), "": self._settings.everything}
        for name, target in targets.items():
            if target is not None and kind in target.on:
                whole = {"kind": kind, "at": now, "definition": definition, **body}
                yield Alert(key=f"{kind}:{key}:{name}"[:255], target=name, body=whole, created_at=now, next_at=now)

    def _of_incidents(self, now: float) -> Iterator[Alert]:
        newest = Incident.objects.using(self._alias).order_by("-id").values_list("id", flat=True).first() or 0
        mark, _ = ScopeEpoch.objects.using(self._alias).get_or_create(scope=SCOPE, defaults={"epoch": newest, "holder": ""})
        rows = Incident.objects.using(self._alias).filter(id__gt=mark.epoch).order_by("id")
        for row in rows.select_related("job", "job__job_definition")[:LOOK_MAX]:
            if row.kind not in _KINDS:
                continue
            of = row.job.job_definition.name if row.job.job_definition_id and row.job.job_definition else ""
            body = {"job_id": row.job.job_id, "subject": row.job.subject, "attempt": row.attempt, "reason": row.reason[:1000]}
            yield from self._make(_KINDS[row.kind], str(row.pk), of, now, body)

    def _settle(self, now: float) -> None:
        """Move the mark over incidents that are old enough."""
        mark = ScopeEpoch.objects.using(self._alias).get(scope=SCOPE)
        looked = Incident.objects.using(self._alias).filter(id__gt=mark.epoch).order_by("id")[:LOOK_MAX]
        for row in looked:
            if row.at.timestamp() >= now - SETTLED_S:
                break
            mark.epoch = row.pk
        ScopeEpoch.objects.using(self._alias).filter(scope=SCOPE, epoch__lt=mark.epoch).update(epoch=mark.epoch)

    def _of_late_definitions(self, now: float) -> Iterator[Alert]:
        rows = DefinitionState.objects.using(self._alias).filter(next_at__lt=now - self._settings.late_seconds, problem="")
        for row in rows.filter(definition__enabled=True).select_related("definition")[:LOOK_MAX]:
            due = row.next_at.timestamp()
            yield from self._make("late", f"{row.pk}:{due:.0f}", row.definition.name, now, {"due_at": due})

    def _of_missing_leader(self, now: float) -> Iterator[Alert]:
        """On PostgreSQL the leader's lock is a row; or it is in Redis, where the last turn of a leader is noted."""
        led: models.QuerySet[Any]
        if self._coordination:
            with closing(open_scheduler_coordination(self._coordination)) as shared:
                led_ago_s = shared.led_ago_s()
            if led_ago_s is None or led_ago_s < self._settings.late_seconds:
                return
            led = ScopeEpoch.objects.using(self._alias).filter(scope="leader")
        else:
            led = ScopeLease.objects.using(self._alias).filter(scope="leader", expires_at__lt=now - self._settings.late_seconds)
        for epoch, holder in led.values_list("epoch", "holder"):
            yield from self._make("no_leader", str(epoch), "", now, {"last_leader": holder, "epoch": epoch})

    def _send_due(self, now: float) -> None:
        rows = Alert.objects.using(self._alias)
        began, unreachable = time.monotonic(), dict[str, Exception]()
        for row in rows.filter(next_at__lte=now).order_by("next_at", "id")[:SEND_MAX]:
            if self.closing.is_set():
                break
            claimed_at = now + time.monotonic() - began
            mine = rows.filter(pk=row.pk, tries=row.tries, next_at__isnull=False)
            if not mine.update(tries=row.tries + 1, next_at=claimed_at + CLAIM_S):
                continue  # another node sends it
            deadline = time.monotonic() + SEND_S
            target = self._settings.definitions.get(row.target) if row.target else self._settings.everything
            change: dict[str, Any] = {"next_at": None, "problem": ""}
            try:
                if target is not None:
                    if target.url in unreachable:  # the alerts of others do not wait for it again
                        raise unreachable[target.url]
                    send(target, {"id": row.pk, **row.body}, deadline)
            except Exception as error:  # noqa: BLE001 - whatever one receiver does, others get their alerts
                if target is not None and isinstance(error, OSError):
                    unreachable[target.url] = error
                change = self._untaken(row, claimed_at, error)
            rows.filter(pk=row.pk, tries=row.tries + 1).update(**change)

    def _untaken(self, row: Alert, now: float, error: Exception) -> dict[str, Any]:
        """Return what becomes of an alert that its receiver did not take."""
        slow = f"the receiver had not answered within {SEND_S:g} s"
        problem = slow if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)[:1000]
        if row.created_at.timestamp() < now - KEEP_S:
            logger.error("alert %s is given up, as nobody has taken it for %.0f days: %s", row.key, KEEP_S / 86_400, problem)
            return {"next_at": None, "problem": problem}
        logger.warning("alert %s was not taken, and is sent again: %s", row.key, problem)
        return {"next_at": now + BACKOFF.delay_s(row.tries), "problem": problem}


def send(target: AlertTarget, body: dict[str, Any], deadline: float) -> None:
    """POST a signed body to a receiver. Forbidden: its address is not a public one; OSError, InvalidInput: it did not take it,
    or not before the deadline, a time of `time.monotonic`."""
    parts = urlsplit(target.url)
    assert parts.hostname is not None  # AlertTarget has looked
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = checked_address(parts.hostname, port, allow_private=target.allow_private)
    data = json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "tasuki"}
    if target.secret:
        headers[SIGNATURE] = "sha256=" + hmac.new(target.secret.encode(), data, hashlib.sha256).hexdigest()
    request = http.client.HTTPConnection(parts.hostname, parts.port)
    # The address that was checked, not asked for again.
    request.sock = socket.create_connection((address, port), _left_s(deadline))
    try:
        if parts.scheme == "https":
            request.sock.settimeout(_left_s(deadline))
            request.sock = ssl.create_default_context().wrap_socket(request.sock, server_hostname=parts.hostname)
        request.sock.settimeout(_left_s(deadline))
        request.request("POST", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""), data, headers)
        status = _status(request.sock, deadline)
    finally:
        request.close()
    if not 200 <= status < 300:  # redirects are not followed
        raise InvalidInput(f"the receiver answered {status}")


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _status(link: socket.socket, deadline: float) -> int:
    """Return the status of the answer, of which no more than the first line is read. A receiver that sends a byte now and then
    gains no time."""
    line = b""
    while b"\n" not in line and len(line) < STATUS_MAX_BYTES:
        link.settimeout(_left_s(deadline))
        if not (more := link.recv(STATUS_MAX_BYTES)):
            break
        line += more
    protocol, _, rest = line.partition(b" ")
    if not protocol.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise InvalidInput(f"the receiver answered {line[:40]!r}, which is not HTTP")
    return int(rest[:3])


def checked_address(host: str, port: int, *, allow_private: bool) -> str:
    """Return the address of a host; Forbidden unless all that it has are public ones, or others are allowed."""
    found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in found:
        if not allow_private and not _is_public(ipaddress.ip_address(text.partition("%")[0])):
            meant = "for a private receiver set allow_private (--webhook-private)"
            raise Forbidden(f"{host} has the address {text}, which is not public; {meant}")
    return found[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address is public; one that a gateway or the kernel turns into an IPv4 address is judged as that."""
    if isinstance(address, ipaddress.IPv6Address):
        if (inner := address.ipv4_mapped or address.sixtofour) is not None:
            return _is_public(inner)
        if address in NAT64:
            return _is_public(ipaddress.IPv4Address(address.packed[-4:]))
        if address not in GLOBAL_UNICAST:  # is_global says yes to some that are local, as fec0::/10
            return False
    return address.is_global and not address.is_multicast


def server_alias(file: Path, store_url: str) -> str:
    """Return the alias of a server's store for another connection than the store's own; Django is set up by then."""
    if not store_url:
        return standalone.register(file)
    from tasuki.stores.sql.postgres import connection_parameters

    return standalone.register_postgresql(connection_parameters(store_url))


class AlertLoop:
    """The alerts in a node or a server, on a thread whose connection is open only while it looks."""

    def __init__(self, alias: str, settings: AlertSettings, coordination: str = "") -> None:
        self._alerts = Alerts(alias, settings, coordination)
        self._alias, self._is_wanted = alias, wanted(settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tasuki-alerts")

    async def run(self, report: Callable[[str], None] = logger.warning) -> None:
        """Make and send alerts until this is canceled; end at once, if there is no receiver."""
        problem = ""
        while self._is_wanted:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._step)
                problem = ""
            except Exception as error:  # noqa: BLE001 - whatever it is, alerts are looked for again
                if str(error) != problem:
                    report(f"alerts are delayed: {error}")
                problem = str(error)
            await asyncio.sleep(INTERVAL_S)

    def _step(self) -> None:
        try:
            self._alerts.step()
        finally:
            connections[self._alias].close()

    def close(self) -> None:
        """Begin no further send. One that is under way ends by itself: the caller's loop must not wait for a receiver."""
        self._alerts.closing.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
