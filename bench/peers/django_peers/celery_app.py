"""Celery: beat and a prefork worker on Redis. A crontab is due each minute: the clocks of the entries are seconds apart."""

import os
import time
from datetime import UTC, datetime, timedelta

from celery import Celery
from celery.schedules import crontab

STEP_S = 3


def _clock(seconds):
    return lambda: datetime.now(UTC) + timedelta(seconds=seconds)


app = Celery("celery_app", broker=os.environ["PEERS_REDIS_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    beat_max_loop_interval=1,
    beat_schedule={
        f"s{second}": {"task": "due", "schedule": crontab(minute="*", nowfun=_clock(second)), "args": [second]}
        for second in range(0, 60, STEP_S)
    },
)


@app.task(name="due")
def due(second):
    """Leave a stamp with the nominal time: the last whole minute of the entry's clock."""
    now = time.time()
    nominal = (now + second) // 60 * 60 - second
    file = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"s{second}@{nominal:.0f} {now:.6f}\n".encode())
    os.close(file)
