"""A command that does what its arguments say."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from django.core.management.base import BaseCommand, CommandError

from probes import words


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("what")
        parser.add_argument("folder", nargs="?", default="")
        parser.add_argument("--event")

    def handle(self, *args, what, folder, **options):
        getattr(self, what)(Path(folder))

    def say(self, _folder):
        print(f"{words.WORD} pid {os.getpid()} parent {os.getppid()} fresh {'TASUKI_FRESH_INTERPRETER' in os.environ}")
        print("to stderr", file=sys.stderr)

    def note(self, folder):
        """Add a line to the ledger of `tests/e2e/stage.py`."""
        with (folder / "ledger").open("a") as ledger:
            ledger.write(f"{os.environ['TASUKI_JOB_ID']} {os.environ['TASUKI_ATTEMPT']} {os.getpid()} {time.time():.3f}\n")
        print("noted")

    def schedule(self, _folder):
        print(os.environ["TASUKI_DEFINITION"], os.environ["TASUKI_SCHEDULED_FOR"])

    def fail(self, _folder):
        raise CommandError("as wanted", returncode=7)

    def flood(self, _folder):
        for number in range(300):
            print(f"{number:05d} " + "x" * 8000)

    def noisy(self, _folder):
        """Write 10 MB with HTML, escape sequences, bytes that are no text, and a very long line."""
        out = sys.stdout.buffer
        out.write(b"<script>document.title='owned'</script>\x1b[31mred\x1b[0m\x00\xff\n" + b"y" * 200_000 + b"\n")
        for number in range(100_000):
            out.write(b"%099d\n" % number)
        out.write(b"the last line\n")
        out.flush()

    def hold(self, folder):
        print("begun")
        (folder / "running").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
        print("ended")

    def alone(self, folder):
        """Hold a lock, also by a child in a session of its own, and ignore SIGTERM; tell if another one still holds it."""
        lock = (folder / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            (folder / "overlap").touch()
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "300"], start_new_session=True, pass_fds=[lock.fileno()])
        (folder / f"began-{os.environ['TASUKI_JOB_ID']}").touch()
        time.sleep(300)

    def stubborn(self, folder):
        """Leave a grandchild, and ignore SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (folder / "pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(300)
