"""APScheduler, in its own process and memory: the limit of any schedule, without durability."""

import os
import time

from apscheduler.schedulers.blocking import BlockingScheduler

STEP_S = 3


def due():
    now = time.time()
    file = os.open(os.environ["BENCH_STAMPS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"a@{now // STEP_S * STEP_S:.0f} {now:.6f}\n".encode())
    os.close(file)


scheduler = BlockingScheduler(timezone="UTC")
scheduler.add_job(due, "cron", second=f"*/{STEP_S}")
scheduler.start()
