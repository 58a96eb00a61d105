"""`tasuki pub`, `tasuki sub` and `tasuki request`: messages to the present subscribers; they are stored nowhere."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from tasuki.cli.command import (
    STDIN,
    Destination,
    Duration,
    argument,
    command,
    connection_options,
    duration,
    flag,
    number,
    option,
    options,
    several,
)
from tasuki.cli.connect import with_client
from tasuki.cli.output import Output, encode_json, write_line
from tasuki.errors import InvalidInput

if TYPE_CHECKING:
    from tasuki.client.aio import AsyncClient
    from tasuki.core.protocol import PublishedMessage
    from tasuki.net.messages import AsyncMessageSubscription

TELL_S = 1.0  # between two looks at what was lost

_message = options(
    argument("subject", metavar="SUBJECT", help="Subject of the message."),
    argument("payload", metavar="[PAYLOAD]", required=False, default="", help="Its contents; - for those of stdin."),
    several("--header", "-H", metavar="NAME=VALUE", help="A header of the message. Several times."),
)


def _payload(text: str) -> bytes:
    return sys.stdin.buffer.read() if text == STDIN else text.encode()


def _headers(given: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if wrong := next((name for name, equals, _ in pairs if not (name and equals)), None):
        raise InvalidInput(f"--header {wrong!r} must be NAME=VALUE")
    return {name: value for name, _, value in pairs}


@command(
    "pub",
    examples=[
        "tasuki pub prices.fx.eurusd 1.0931",
        "tasuki pub prices.fx.eurusd 1.0931 -H source=ecb",
        "tasuki pub config.new -                    # its contents come from stdin",
        "tasuki pub test.load x --count 1000",
    ],
)
@_message
@option("--reply-to", metavar="SUBJECT", default="", help="Subject to which answers may be published.")
@number("--count", metavar="N", type=int, default=1, help="How often it is published.")
@connection_options()
def pub(
    output: Output, subject: str, payload: str, header: tuple[str, ...], reply_to: str, count: int, place: Destination
) -> None:
    """All who are subscribed to the subject at that moment get it, at every server of the store. It is stored nowhere."""
    if count < 1:
        raise InvalidInput(f"--count must be 1 or more, got {count}")
    data, headers = _payload(payload), _headers(header)

    async def work(client: AsyncClient) -> None:
        for _ in range(count):
            await client.publish(subject, data, headers=headers, reply_to=reply_to)
        await client.flush()

    with_client(place, work)
    output.show({"subject": subject, "published": count}, list)


@command(
    "sub",
    examples=[
        "tasuki sub 'prices.>'                      # until Ctrl-C",
        "tasuki sub 'prices.*.eurusd' --count 1 --raw",
        "tasuki sub 'render.done.>' --json | jq .subject",
        "tasuki sub 'mail.send' --queue senders     # of all with this queue, one gets each message",
    ],
)
@argument("pattern", metavar="PATTERN", help="Subjects, * and > allowed.")
@option("--queue", metavar="NAME", default="", help="Queue group: of its members one gets a message.")
@number("--count", metavar="N", type=int, help="End after so many messages. Default: Ctrl-C ends it.")
@flag("--raw", help="Print the contents alone, as they are, a line each.")
@connection_options()
def sub(output: Output, pattern: str, queue: str, count: int | None, raw: bool, place: Destination) -> None:
    """Prints subject and contents of each message, a line each; with --json an object with the headers too.

    A message that came while nobody was connected is gone. So are messages that come faster than they are read: how many is told.
    """
    if count is not None and count < 1:
        raise InvalidInput(f"--count must be 1 or more, got {count}")

    async def work(client: AsyncClient) -> None:
        async with client.subscribe(pattern, queue=queue) as messages:
            output.hint(f"subscribed to {pattern}" + (f" in queue group {queue}" if queue else ""))
            await _print_all(output, messages, raw, count)

    with_client(place, work)


async def _print_all(output: Output, messages: AsyncMessageSubscription, raw: bool, count: int | None) -> None:
    def tell_losses() -> None:
        if lost := messages.newly_dropped():
            if output.json:
                write_line(encode_json({"dropped": lost}))
            output.hint(f"tasuki: {lost} messages were dropped, they came faster than they were read")

    async def tell_while_nothing_comes() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            if not printing:
                tell_losses()

    printed, printing = 0, False
    telling = asyncio.ensure_future(tell_while_nothing_comes())
    try:
        async for message in messages:
            printing = True
            await asyncio.to_thread(_print, output, message, raw)
            printing = False
            tell_losses()
            printed += 1
            if printed == count:
                return
    finally:
        telling.cancel()
        tell_losses()


def _print(output: Output, message: PublishedMessage, raw: bool) -> None:
    """Print one message, in a thread: a slow reader of the output does not keep us from answering the server."""
    if output.json:
        write_line(encode_json(_view(message)))
    elif raw:
        sys.stdout.buffer.write(message.payload + b"\n")
        sys.stdout.buffer.flush()
    else:
        write_line(f"{message.subject} {message.payload.decode('utf-8', 'replace')}".rstrip())


def _view(message: PublishedMessage) -> dict[str, Any]:
    """Return a message for --json: the payload as text, or if it is none as base64."""
    view: dict[str, Any] = {"subject": message.subject, "headers": message.headers, "reply_to": message.reply_to}
    try:
        return {**view, "payload": message.payload.decode()}
    except UnicodeDecodeError:
        return {**view, "payload_base64": message.payload}


@command("request", examples=["tasuki request time.now", "tasuki request price.of eurusd --timeout 2s"])
@_message
@duration("--timeout", type=Duration(above=True), default=5.0, help="How long to wait for the answer.")
@connection_options()
def request(output: Output, subject: str, payload: str, header: tuple[str, ...], timeout: float, place: Destination) -> None:
    """Prints the contents of the first answer. A subscriber answers by publishing to the message's reply_to."""
    data, headers = _payload(payload), _headers(header)
    answer = with_client(place, lambda client: client.request(subject, data, timeout, headers=headers))
    if output.json:
        output.show(_view(answer), list)
    else:
        _print(output, answer, raw=True)
