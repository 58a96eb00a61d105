"""The same task for each peer: its first line leaves a stamp; and empty ones."""

import os
import time

from django_tasks import task
from procrastinate.contrib.django import app

STEP_S = 3


def stamp(name):
    """Add a line to the file that BENCH_STAMPS names."""
    line = f"{name} {time.time():.6f}\n".encode()
    file = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, line)
    os.close(file)


@app.task(name="stamped")
def procrastinate_stamped(name):
    stamp(name)


@app.periodic(cron=f"* * * * * */{STEP_S}")
@app.task(name="periodic")
def procrastinate_periodic(timestamp):
    if os.environ.get("BENCH_PERIODIC"):
        stamp(f"p@{timestamp}")


@task
def tasks_db_stamped(name):
    stamp(name)


def q_stamped(name):
    stamp(name)
