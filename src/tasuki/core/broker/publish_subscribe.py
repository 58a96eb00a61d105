"""Conversations about messages: subscribing, publishing, and the way of a message to its subscribers. Pure.

Nothing of this is stored: a message reaches those who are subscribed when it comes, at most once each. A subscription ends with
its connection. Where several servers share a store, each sends its publishers' messages to all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.core import protocol
from tasuki.core.broker.events import Command, Deliver, Relay
from tasuki.core.broker.state import BrokerState, Session
from tasuki.core.cluster_messages import RelayedMessage
from tasuki.core.machine import Send
from tasuki.core.subject import group_of
from tasuki.core.subscribers import INBOX, FoundSubscribers
from tasuki.errors import InvalidInput, TasukiError

VERBS = SUBSCRIBE, UNSUBSCRIBE = "subscribe", "unsubscribe"


def request(state: BrokerState, session: Session, message: protocol.Request) -> list[Command]:
    """Take the request `subscribe` or `unsubscribe`."""
    pattern, queue = message.params.get("pattern"), message.params.get("queue", "")
    if not isinstance(pattern, str) or not isinstance(queue, str):
        raise InvalidInput(f"{message.verb} needs pattern, a text, and takes queue, another one")
    if message.verb == SUBSCRIBE:
        assert session.identity is not None
        session.identity.check_subscribe(pattern)
        state.subscribe(session, pattern, queue)
    elif not state.unsubscribe(session, pattern, queue):
        raise InvalidInput(f"unsubscribe: this connection has no subscription to {pattern[:255]!r} with queue {queue[:64]!r}")
    return [Send(session.conn, protocol.Reply(message.msg_id, {"subscriptions": state.messages.of(session.conn)}))]


def publish(state: BrokerState, session: Session, message: protocol.PublishMessages) -> list[Command]:
    """Send messages on their way. One that is refused keeps no other from it; the first refusal is told."""
    identity = session.identity
    assert identity is not None
    refusals: list[TasukiError] = []
    items: Sequence[protocol.PublishedMessage] = message.items
    is_limited = bool(identity.scope)
    allowed: list[protocol.PublishedMessage] = []
    for item in items:
        try:
            protocol.check_published(item)
            if is_limited:
                identity.check_publish(item.subject)
            allowed.append(item)
        except TasukiError as error:
            refusals.append(error)
    state.published.update(group_of(item.subject) for item in allowed)
    commands = route(state, allowed)
    if state.cluster.servers:
        commands += _relay(state, allowed)
    if refusals:
        first = refusals[0]
        others = f"; {len(refusals)} of {len(items)} messages were not published" if len(items) > 1 else ""
        commands.append(Send(session.conn, protocol.ErrorMessage(message.msg_id, first.code, first.message + others)))
    elif message.confirm:
        commands.append(Send(session.conn, protocol.Reply(message.msg_id)))
    return commands


def route(state: BrokerState, items: Sequence[protocol.PublishedMessage]) -> list[Command]:
    """Return the commands that deliver messages to the subscribers of this server, those with the same receivers together."""
    commands: list[Command] = []
    find = state.messages.find
    start, before = 0, None
    for place, item in enumerate(items):
        found = find(item.subject)
        if found is not before:
            if before is not None:
                commands += _deliver(state, before, items[start:place])
            start, before = place, found
    if before is not None:
        commands += _deliver(state, before, items[start:] if start else items)
    return commands


def _deliver(state: BrokerState, receivers: FoundSubscribers[int], items: Sequence[protocol.PublishedMessage]) -> list[Command]:
    commands: list[Command] = []
    if receivers.places:
        commands.append(Deliver(receivers.places, protocol.DeliverMessages(list(items))))
    for queue, members in receivers.queues.items():
        turn = state.next_member
        state.next_member += len(items)
        for place, conn in enumerate(members):
            share = items[(place - turn) % len(members) :: len(members)]
            if share:
                commands.append(Deliver((conn,), protocol.DeliverMessages(list(share), queue)))
    if not receivers and not state.cluster.servers:
        answers = [protocol.PublishedMessage(item.reply_to, b"", "", protocol.NO_RECEIVERS) for item in items if item.reply_to]
        for answer in answers:
            if waiting := state.messages.find(answer.subject).places:
                commands.append(Deliver(waiting, protocol.DeliverMessages([answer])))
    return commands


# ---------------------------------------------------------------------------------------------------- other servers


def _relay(state: BrokerState, items: Sequence[protocol.PublishedMessage]) -> list[Command]:
    """Return the command that sends messages to the other servers. An answer whose inbox is here stays here.

    A queue group is served by this server if a member is here, else by one that has a member.
    """
    messages: list[RelayedMessage] = []
    for item in items:
        here = state.messages.find(item.subject)
        if item.subject.startswith(INBOX) and here:
            continue
        queues = dict.fromkeys(here.queues, state.config.server_id)
        for queue, server_ids in state.cluster.members.find(item.subject).queues.items():
            if queue not in queues:
                state.next_member += 1
                queues[queue] = server_ids[state.next_member % len(server_ids)]
        messages.append(RelayedMessage(item, queues))
    return [Relay(messages)] if messages else []


def relayed(state: BrokerState, messages: Sequence[RelayedMessage]) -> list[Command]:
    """Deliver messages of another server's publishers to the subscribers of this one."""
    commands: list[Command] = []
    for relayed in messages:
        found = state.messages.find(relayed.message.subject)
        queues = {queue: members for queue, members in found.queues.items() if _is_ours(state, relayed, queue)}
        if found.places or queues:
            commands += _deliver(state, FoundSubscribers(found.places, queues), [relayed.message])
    return commands


def _is_ours(state: BrokerState, relayed: RelayedMessage, queue: str) -> bool:
    return relayed.queues.get(queue) == state.config.server_id
