"""Celery: beat, with its schedule in memory, and a prefork worker on Redis. One entry is due at each third second."""

import os
import time

from celery import Celery
from celery.schedules import BaseSchedule, schedstate

STEP_S = 3


class EachStep(BaseSchedule):
    """Due whenever the clock shows a multiple of STEP_S: a crontab knows no seconds."""

    def is_due(self, last_run_at):
        now = time.time()
        is_due = now // STEP_S > last_run_at.timestamp() // STEP_S
        return schedstate(is_due, STEP_S - now % STEP_S)


app = Celery("celery_app", broker=os.environ["PEERS_REDIS_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    beat_scheduler="celery.beat:Scheduler",
    beat_schedule={"due": {"task": "due", "schedule": EachStep()}},
)


@app.task(name="due")
def due():
    """Leave a stamp with the nominal time."""
    now = time.time()
    file = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"c@{now // STEP_S * STEP_S:.0f} {now:.6f}\n".encode())
    os.close(file)
