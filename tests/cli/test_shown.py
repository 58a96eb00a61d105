"""Things that people see: no password of an address, and no control character of anybody else."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import msgspec
import pytest

from tasuki.agent.input_sources import open_store
from tasuki.blobs.open_blobs import open_blobs
from tasuki.blobs.s3.requests import parse_s3_url
from tasuki.cli.arrays import _progress, element_number
from tasuki.cli.connect import StoreAddress, guest_places
from tasuki.cli.main import root
from tasuki.cli.output import Output
from tasuki.cli.process import JsonFormatter, _PlainFormatter
from tasuki.config import parse_http, parse_listen
from tasuki.core.address import parse_agents, parse_url
from tasuki.core.job import CONTROL_CHARACTERS, Outcome
from tasuki.core.protocol import AssignJobs, Ending, GiveCredit, JobsFinished, Subscribe
from tasuki.errors import InvalidInput, TasukiError
from tasuki.server.assembly import check_store
from tasuki.stores.redis.connection import connect
from tasuki.stores.sql.postgres import connection_parameters
from tests.cli.commands import PROCESS_WORDS, User, running
from tests.doors.raw import RawPeer

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31mred\x7f\u202ecod.exe\r\nfaked"
SECRET = "hunter2"
ADDRESS_OPTIONS = {
    "--to", "--store", "--blobs", "--coordination", "--registry", "--results", "--inputs", "--advertise", "--tcp", "--http",
    "--listen", "--agents", "--peers", "--presign-endpoint", "--webhook",
}  # fmt: skip
WITH_PASSWORD = [
    f"redis://:{SECRET}@127.0.0.1:1/0",
    f"postgres://u:{SECRET}@127.0.0.1:1/db?connect_timeout=2",
    f"mysql://u:a@b:{SECRET}@127.0.0.1:1/db",
    f"http://u:{SECRET}@127.0.0.1:1",
    f"http://127.0.0.1:1/?token={SECRET}",
    f"s3://u:{SECRET}/x@bucket/p",
    f"agents:http://u:{SECRET}@127.0.0.1:1",
    f"ftp://u:{SECRET}/x?y@127.0.0.1:1",
    f"u:{SECRET}@127.0.0.1:1",
    f"host=127.0.0.1 port=1 password={SECRET}",
    f"redis://:{SECRET}",
    f"redis+cluster://a:1,u:{SECRET}",
    f"postgresql://u:{SECRET}/db",
    f"tcp://u:{SECRET},x",
    f"agents:http://u:{SECRET}",
    f"u:1:{SECRET}",
]


def commands(group: click.Group = root, *words: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Walk all words of `tasuki`."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *words, word)
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield (*words, word), command


def needed(command: click.Command) -> list[str]:
    """Return words for the parameters that a command cannot be without."""
    return [
        word
        for parameter in command.params
        if parameter.required and parameter.name != "agents"
        for word in (["x"] if isinstance(parameter, click.Argument) else [parameter.opts[0], "x"])
    ]


READERS = [
    parse_url,
    parse_agents,
    parse_http,
    parse_listen,
    parse_s3_url,
    check_store,
    partial(open_blobs, max_blob_bytes=1, floor_free_bytes=0),
    partial(open_store, max_blob_bytes=1, floor_free_bytes=0),
    partial(connect, timeout_s=1.0),
    connection_parameters,
    lambda address: guest_places(StoreAddress(address), Path("data")),
]
PLACES = [
    (words, option, needed(command))
    for words, command in commands()
    for option in sorted(ADDRESS_OPTIONS & {name for parameter in command.params for name in parameter.opts})
]


def test_the_options_that_take_an_address_are_known() -> None:
    found = {
        parameter.opts[0]
        for _, command in commands()
        for parameter in command.params
        if parameter.metavar in ("URL", "URLS", "HOST:PORT", "WHERE", "AGENTS")
    }

    assert found <= ADDRESS_OPTIONS


@pytest.mark.parametrize("address", WITH_PASSWORD)
def test_no_command_shows_the_password_of_a_servers_address(user: User, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    for module in ("doctor", "connect"):
        monkeypatch.setattr(f"tasuki.cli.{module}.CONNECT_TIMEOUT_S", 0.1)
    for words, option, more in PLACES:
        if words[0] not in PROCESS_WORDS:
            done = user.run(*words, f"{option}={address}", *more)

            assert done.returncode != 0 or "--help" in done.stdout, words
            assert SECRET not in done.stdout + done.stderr, words


@pytest.mark.parametrize("address", WITH_PASSWORD)
@pytest.mark.parametrize("read", READERS)
def test_no_service_shows_the_password_of_an_address(read: Callable[[str], object], address: str) -> None:
    told = ""
    try:
        read(address)
    except TasukiError as error:
        told = error.message

    assert SECRET not in told


OF_AGENTS = [(word,) for word in ("nodes", "status", "list", "result", "logs", "cancel")]


def shows_nothing_evil(text: str) -> bool:
    return CONTROL_CHARACTERS.search(text.replace("\n", "")) is None and "\nfaked" not in text


class _HostileServer(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        body = msgspec.json.encode({"error": {"code": self.server.code, "message": EVIL, "details": {EVIL: EVIL}}})  # type: ignore[attr-defined]
        self.send_response(400)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["people", "json"])
@pytest.mark.parametrize("code", ["INVALID", EVIL])
def test_errors_of_a_hostile_server_are_printed_without_control_characters(
    user: User, monkeypatch: pytest.MonkeyPatch, code: str, json_option: list[str]
) -> None:
    monkeypatch.setattr("tasuki.cli.connect.CONNECT_TIMEOUT_S", 0.1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _HostileServer)
    server.code = code  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        for words, option, more in PLACES:
            if option == "--to" and words[0] not in {*PROCESS_WORDS, "doctor"}:
                url = f"http://127.0.0.1:{server.server_port}"
                for place in [f"agents:{url}"] * (words in OF_AGENTS) + [url] * (words != ("nodes",)):
                    done = user.run(*words, "--to", place, *json_option, *more)

                    assert shows_nothing_evil(done.stdout + done.stderr), (words, place)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.e2e
def test_the_words_of_a_hostile_worker_are_printed_without_control_characters(user: User) -> None:
    with running(user, "server", "--no-tcp"):  # without a worker that would take the jobs
        _show_the_words_of_a_hostile_worker(user)


def _show_the_words_of_a_hostile_worker(user: User) -> None:
    for number in range(2):
        done = user.run("submit", "--job-id", f"evil-{number}", "--subject", "evil.jobs", "--retries", "0", "x")
        assert done.returncode == 0, done.stderr
    with RawPeer(f"unix://{user.data}/socket") as worker:
        worker.as_worker()
        worker.send(Subscribe(worker.next_id(), ("evil.>",)), GiveCredit(2))
        ended = 0
        while ended < 2:
            message = worker.receive()
            for grant in message.grants if isinstance(message, AssignJobs) else ():
                outcome = Outcome(error_code="EVIL", message=EVIL, permanent=True)
                worker.send(JobsFinished([Ending(grant.job_id, grant.lease_id, grant.attempt, outcome)]))
                ended += 1
        worker.alive()
        for words in (
            ["run", "--job-id", "evil-0", "--subject", "evil.jobs", "--retries", "0", "x"],
            ["result", "evil-0"],
            ["status", "evil-0"],
            ["list"],
            ["explain", "evil-0"],
            ["dead", "list"],
            ["dead", "show", "evil-0"],
            ["logs", "evil-0"],
        ):
            for json_option in ([], ["--json"]):
                done = user.run(words[0], *json_option, *words[1:]) if words[0] != "dead" else user.run(*words, *json_option)

                assert shows_nothing_evil(done.stdout + done.stderr), words


def test_hints_progress_lines_and_wrong_words_are_printed_without_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")  # colours are tasuki's own
    output = Output()
    output.show({}, lambda: [EVIL])
    output.hint(EVIL)
    output.error(InvalidInput(EVIL))
    output.progress(EVIL)
    Output(json=True).show({EVIL: EVIL}, list)
    with pytest.raises(SystemExit):
        root(args=["list", f"--{EVIL}"], prog_name="tasuki")
    shown = capsys.readouterr()

    assert shows_nothing_evil(shown.out + shown.err.replace("\r\033[K", ""))
    assert msgspec.json.decode(shown.out.splitlines()[-1]) == {EVIL: EVIL}


@pytest.mark.parametrize("formatter", [_PlainFormatter(), JsonFormatter()], ids=["pretty", "json"])
def test_logs_are_written_without_control_characters(formatter: logging.Formatter) -> None:
    try:
        raise ValueError(EVIL.replace("\n", ""))
    except ValueError:
        record = logging.getLogger("tasuki").makeRecord("tasuki", logging.INFO, "", 0, "told: %s", (EVIL,), sys.exc_info())

    assert shows_nothing_evil(formatter.format(record))


def test_jobs_that_had_ended_before_say_nothing_about_the_time_that_is_left() -> None:
    assert _progress(900, 1000, 0, 0, took_s=0.5, ended_before=900) == "900 of 1000 jobs have ended"
    assert _progress(950, 1000, 0, 0, took_s=60, ended_before=900) == "950 of 1000 jobs have ended, about 60s left"


def test_elements_of_an_array_are_sorted_by_number_whoever_made_them() -> None:
    assert sorted(["a.10", "a.9", "a"], key=element_number) == ["a", "a.9", "a.10"]
    assert sorted(["pages-10", "pages-9"], key=element_number) == ["pages-9", "pages-10"]
