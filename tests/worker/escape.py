"""A job that hides: `python escape.py FILE [untagged] [leave]`. Adds its own number and that of its escapee to the file.

The escapee is forked twice, in a session of its own, without environment, working folder or open file of the job, deaf to
TERM; `untagged` also puts its limit of file locks back. `leave` ends the first process as soon as the escapee is away.
"""

import os
import resource
import signal
import sys
import time

LIFETIME_S = 60  # nobody who is forgotten stays for longer
RLIMIT_LOCKS = 10
HIDDEN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
os.write(descriptor, b"%d\\n" % os.getpid())
os.close(descriptor)
time.sleep(60)
"""


def escape(file: str, *, untagged: bool) -> None:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(3, 256)
    if untagged:
        resource.setrlimit(RLIMIT_LOCKS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", HIDDEN, file], {})


file, *words = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(file, "a") as numbers:  # noqa: PTH123  # pathlib takes longer to load than all the rest
    numbers.write(f"{os.getpid()}\n")
if os.fork() == 0:
    escape(file, untagged="untagged" in words)
os.wait()
deadline = time.monotonic() + LIFETIME_S
while time.monotonic() < deadline:
    with open(file) as numbers:  # noqa: PTH123
        if "leave" in words and len(numbers.readlines()) == 2:
            break
    time.sleep(0.01)
