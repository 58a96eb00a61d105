"""Stamps: one line for each start, with its name and the time on the machine's clock."""

import os
import time


def stamp(name: str) -> None:
    """Add a line to the file that BENCH_STAMPS names. Called first of all; lines of many processes do not mix."""
    line = f"{name} {time.time():.6f}\n".encode()
    file = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line)
    os.close(file)
