"""`tasuki pub`, `tasuki sub` and `tasuki request`."""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import pytest

from tasuki import Client
from tasuki.cli import messages
from tasuki.cli.output import Output
from tasuki.net.messages import AsyncMessageSubscription
from tests.cli.commands import DEADLINE_S, Running, User
from tests.support.waiting import until_async

pytestmark = pytest.mark.e2e


def test_sub_prints_what_pub_publishes_and_ctrl_c_ends_it_without_a_word(served: tuple[User, Running]) -> None:
    user, _ = served
    sub = user.start("sub", "cli.prices.>")
    try:
        assert sub.stdout is not None
        assert sub.stderr is not None
        assert sub.stderr.readline() == "subscribed to cli.prices.>\n"

        assert user.run("pub", "cli.prices.fx", "1.09\x1b", "--count", "2").stdout == ""
        user.run("pub", "cli.prices.empty")

        assert [sub.stdout.readline() for _ in range(3)] == ["cli.prices.fx 1.09\\u001b\n"] * 2 + ["cli.prices.empty\n"]
        sub.send_signal(signal.SIGINT)
        assert sub.wait(DEADLINE_S) == 130
        assert (sub.stdout.read(), sub.stderr.read()) == ("", "")
    finally:
        sub.kill()
        sub.communicate()


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            ("--json",),
            [
                '{"subject":"cli.%s.a","headers":{"source":"ecb"},"reply_to":"cli.answers","payload":"1"}',
                '{"subject":"cli.%s.b","headers":{},"reply_to":"","payload_base64":"/w=="}',
            ],
        ),
        (("--raw", "--queue", "readers"), ["1", "\udcff"]),
    ],
    ids=["json", "raw"],
)
def test_sub_ends_after_so_many_messages(served: tuple[User, Running], options: tuple[str, ...], lines: list[str]) -> None:
    user, _ = served
    subject = f"cli.{options[0].strip('-')}"
    with Client(f"unix://{user.data / 'socket'}") as client:
        is_over = threading.Event()

        def publish() -> None:
            """Publish again and again: whoever is not subscribed yet gets nothing."""
            while not is_over.wait(0.05):
                client.publish(f"{subject}.a", b"1", headers={"source": "ecb"}, reply_to="cli.answers")
                client.publish(f"{subject}.b", b"\xff")

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            done = user.run_process("sub", f"{subject}.*", "--count", "2", *options)
        finally:
            is_over.set()
            publishing.join()

    assert done.returncode == 0, done.stderr
    wanted = [line.replace("%s", subject.partition(".")[2]) for line in lines]
    assert sorted(done.stdout.splitlines()) == sorted(wanted)


def test_sub_tells_what_was_dropped_also_while_nothing_comes_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exchange:
        def add(self, subscription: AsyncMessageSubscription) -> None:
            subscription.answered(None)

    monkeypatch.setattr(messages, "TELL_S", 0.01)
    hints: list[str] = []
    monkeypatch.setattr(Output, "hint", lambda output, text: hints.append(text))

    async def main() -> None:
        subscription = AsyncMessageSubscription(Exchange(), "a.>", "")  # type: ignore[arg-type]
        printing = asyncio.ensure_future(messages._print_all(Output(), subscription, False, None))
        subscription.dropped = 3
        await until_async(lambda: hints)
        subscription.dropped = 5
        subscription.end(None)
        await printing

    asyncio.run(main())
    assert [hint.partition(" were")[0] for hint in hints] == ["tasuki: 3 messages", "tasuki: 2 messages"]


def test_request_prints_the_answer_or_why_there_is_none(served: tuple[User, Running]) -> None:
    user, _ = served
    with Client(f"unix://{user.data / 'socket'}") as client, client.subscribe("cli.echo") as messages:

        def answer() -> None:
            for _, message in zip(range(2), messages, strict=False):
                client.publish(message.reply_to, message.payload.upper(), headers=message.headers)

        answering = threading.Thread(target=answer)
        answering.start()
        assert user.run("request", "cli.echo", "hello").stdout == "HELLO\n"
        view = user.json("request", "cli.echo", "hello", "-H", "a=b", "--json")
        answering.join()
        assert (view["payload"], view["headers"]) == ("HELLO", {"a": "b"})
        late = user.run("request", "cli.echo", "--timeout", "0.05s")
        assert (late.returncode, late.stderr) == (5, "tasuki: DEADLINE: there was no answer on 'cli.echo' within 0.05s\n")
    nobody = user.run("request", "cli.echo")
    assert nobody.returncode == 3
    assert "there is no subscriber for 'cli.echo'" in nobody.stderr


def test_pub_takes_its_contents_from_stdin_and_tells_what_it_did(served: tuple[User, Running]) -> None:
    user, _ = served
    with Client(f"unix://{user.data / 'socket'}") as client, client.subscribe("cli.stdin") as messages:
        done = user.run("pub", "cli.stdin", "-", "--json", input="from stdin")

        assert json.loads(done.stdout) == {"subject": "cli.stdin", "published": 1}
        assert next(messages).payload == b"from stdin"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("pub", "a.*"), "INVALID: subject 'a.*' has a wildcard"),
        (("pub", "a", "x", "-H", "b"), "INVALID: --header 'b' must be NAME=VALUE"),
        (("pub", "a", "--count", "0"), "INVALID: --count must be 1 or more"),
        (("sub", "a..b"), "INVALID: pattern 'a..b' has an empty token"),
        (("sub", "a", "--count", "-1"), "INVALID: --count must be 1 or more"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(served: tuple[User, Running], words: tuple[str, ...], text: str) -> None:
    done = served[0].run(*words)

    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
