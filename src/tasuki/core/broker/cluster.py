"""Servers on one store: the knowledge that they have of each other, and the hints that they send. Pure.

Two ways. Every server says once a second that it is alive, at which addresses, and which workers are connected to it
(`ServerInfo`, through the coordination): so all know which workers a subject's last token may name, and which servers a peer can
turn to. And after a commit a server sends a hint (`Hint`, collected in `other_servers.py`) about what others may be waiting
for. A hint may be lost: everything that a hint tells is also asked for, a little later, by the server that needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from operator import attrgetter

from tasuki.core.broker.authentication import end_leases
from tasuki.core.broker.client_messages import ask_ends
from tasuki.core.broker.events import AskEnded, AskRevoked, ClusterView, Command
from tasuki.core.broker.state import BrokerState, WorkerSession
from tasuki.core.cluster_messages import Hint
from tasuki.core.machine import Now, Send
from tasuki.core.protocol import CancelLeases
from tasuki.core.store_messages import LeaseHolder, Offer
from tasuki.errors import ProtocolError, Unauthorized

POLL_INTERVAL_S = 1.0  # a revoked token must be noticed within 2 s, whether or not the hint came
POLLED_JOBS = 4_000  # watched jobs that are looked up at each poll, in turns: some 20 ms of an index
SPARE_LOOKERS = 1  # workers that look for another server's job, beside one for each: some may have fallen silent

_subscription = attrgetter("worker_id", "patterns", "addressed")


def met(state: BrokerState, event: ClusterView) -> None:
    """Note the live servers, and the workers that get no more work."""
    cluster = state.cluster
    cluster.servers = {info.server_id: info for info in event.servers if info.server_id != state.config.server_id}
    cluster.learn_members()
    state.routed.left.clear()
    if state.routed.learn(route for info in cluster.servers.values() for route in info.routes):
        state.look_everywhere()
    cluster.ages_s = event.ages_s
    was_detached, cluster.detached = cluster.detached, event.detached
    subscriptions = {server_id: tuple(map(_subscription, info.workers)) for server_id, info in cluster.servers.items()}
    if subscriptions != cluster.subscriptions or was_detached != event.detached:  # else only loads changed, as in most seconds
        cluster.subscriptions = subscriptions
        state.note_live_workers()
        state.leave_no_more(state.left_for - state.live_workers().keys())
    if state.routed.routes and was_detached - event.detached:
        state.look_everywhere()  # routed jobs that nobody else can run were not noted
    for worker_id in was_detached - event.detached:
        if (worker := state.workers.get(worker_id)) is not None:
            state.look(worker, backlog=True)


def heard(state: BrokerState, hint: Hint, now: Now) -> list[Command]:
    """Look at what another server's hint tells of, sooner than without it."""
    if hint.server_id == state.config.server_id:
        return []
    commands: list[Command] = []
    if hint.routed:
        state.routed.told(hint.routed, now)
    if hint.everything:
        state.look_everywhere()
        state.cluster.poll_at = 0.0
    elif hint.ready:
        _look_for(state, hint)
    ask_ends(state, hint.ended)
    for worker_id, lease_id in hint.canceled:
        worker = state.workers.get(worker_id)
        if worker is not None and lease_id in worker.deliveries:
            commands.append(Send(worker.conn, CancelLeases([lease_id])))
    for worker_id, incarnation, owner in hint.moved:
        worker = state.workers.get(worker_id)
        if worker is not None and (worker.incarnation, worker.owner) == (incarnation, owner):
            moved = ProtocolError(f"worker {worker_id!r}: it has connected to server {hint.server_id}")
            commands += state.hang_up(worker.conn, moved)
    return commands + revoked(state, hint.tokens)


def _look_for(state: BrokerState, hint: Hint) -> None:
    """Let some workers look for another server's jobs: as many as there are jobs, not all that are idle, or thousands of workers
    would ask for one job."""
    enough = hint.ready_jobs + SPARE_LOOKERS
    for subject in hint.ready:
        state.note_ready(subject)
        if not hint.ready_jobs:
            state.look_for(subject, backlog=True)
            continue
        named = state.named_worker(subject)
        if named is not None and named.account.available:
            state.look(named, backlog=True)
        lookers: Counter[Offer] = Counter()
        for worker in state.idle_workers(subject):
            is_busy = worker.reading or worker.resuming or worker.worker_id in state.cluster.detached
            if lookers[worker.offer] < enough and not is_busy:
                lookers[worker.offer] += 1  # counted by offer, because the job may be one that only some of them can run
                state.look(worker, backlog=True)
                if lookers[Offer()] >= enough:
                    break


def revoked(state: BrokerState, token_ids: Iterable[str]) -> list[Command]:
    """End the connections of peers that came with these tokens, which are revoked or unknown."""
    commands: list[Command] = []
    for session in state.sessions_of(set(token_ids)):
        if session.identity is not None and not session.token_exchanges:
            if isinstance(session, WorkerSession) and not session.identity.worker_id:
                # End the leases that were granted before this server heard; a bound token may be exchanged.
                end_leases(state, LeaseHolder(session.owner))
            gone = f"token {session.identity.token_id} was revoked, or is not in the store any more"
            commands += state.hang_up(session.conn, Unauthorized(gone))
    return commands


def poll(state: BrokerState, now: Now) -> list[Command]:
    """Ask the store, now and then, what a lost hint would have told, or a turn whose commit this server never heard of."""
    cluster = state.cluster
    if now.monotonic < cluster.poll_at:
        return []
    cluster.poll_at = now.monotonic + POLL_INTERVAL_S
    commands: list[Command] = []
    identities = (session.identity for session in state.sessions.values())
    token_ids = {identity.token_id for identity in identities if identity is not None and identity.token_id}
    if token_ids:
        commands.append(AskRevoked(sorted(token_ids)))
    some = list(islice(cluster.polled, POLLED_JOBS))
    if not some:
        cluster.polled = iter(list(state.watchers))
        some = list(islice(cluster.polled, POLLED_JOBS))
    if some:
        commands.append(AskEnded(some))
    return commands
