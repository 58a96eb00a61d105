"""Functions that the tests of execs of kind python call. Imported by their interpreters, not by the tests."""

import atexit
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CHANCE = random.random()
FORKED = [0]
STATE = {"jobs": 0}
os.register_at_fork(after_in_child=lambda: FORKED.append(os.getpid()))
tempfile.gettempdir()  # remembered by the module: a job must have its own all the same


class Unspeakable:
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no")


class Odd(int):
    """A number that does not behave."""

    def __and__(self, other: object) -> int:
        return 0

    def __index__(self) -> int:
        raise RuntimeError("no")


def give(arguments: list[str]) -> object:
    """Returns what it is told to; None: nothing."""
    return eval(arguments[0], {"Unspeakable": Unspeakable, "Odd": Odd})


def leave(arguments: list[str]) -> None:
    """Ends in the way it is told to."""
    print("before the end")
    sys.stderr.write("on stderr\n")
    exec(arguments[0], {"os": os, "sys": sys, "signal": signal})


def show(arguments: list[str]) -> None:
    """Everything that is a job's own."""
    STATE["jobs"] += 1
    before = dict(os.environ)
    os.environ["LEFT_BEHIND"] = "yes"
    shown = {
        "arguments": arguments,
        "argv": sys.argv,
        "cwd": str(Path.cwd()),
        "env": before,
        "stdin": sys.stdin.read(),
        "jobs": STATE["jobs"],
        "random": random.random(),
        "tempdir": tempfile.gettempdir(),
        "descriptors": sorted(int(link.name) for link in Path("/proc/self/fd").iterdir() if int(link.name) > 2),
        "forked": FORKED[-1] == os.getpid(),
        "session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "nice": os.nice(0),
    }
    sys.stdout.write(json.dumps(shown))


def last_words(arguments: list[str]) -> int:
    """Has more to say when the function itself is over."""

    def later() -> None:
        time.sleep(0.05)
        print("from a thread")

    atexit.register(print, "at exit")
    threading.Thread(target=later).start()
    print("from the function")
    return 3


def hide(arguments: list[str]) -> None:
    """Becomes the job of escape.py, which does all it can not to be found."""
    sys.argv[1:] = arguments[1:]
    runpy.run_path(arguments[0], run_name="__main__")


def wait_for(arguments: list[str]) -> int:
    """Writes its number to one file, and ends when there is another."""
    started, end = map(Path, arguments)
    started.write_text(str(os.getpid()))
    deadline = time.monotonic() + 30
    while not end.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.getppid() % 256


def eat(arguments: list[str]) -> None:
    """More memory in small steps, without end."""
    eaten = []
    while True:
        eaten.append(b"x" * (1 << 20))
        time.sleep(0.002)


def spawn(arguments: list[str]) -> None:
    """Leaves a child behind."""
    subprocess.Popen(["sleep", "60"])


def nothing(arguments: list[str]) -> None:
    """Ends at once."""
