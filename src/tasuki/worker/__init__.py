"""The worker: slots, allow-listed execs, handlers, run folders, renewals and reports.

May import `tasuki.wire`, `tasuki.blobs`, `tasuki.stores` (to lease straight from a store), and what all may import
(`core`, `errors`, `config`). Importing it never imports Django.
"""

from tasuki.worker.attempt import HandlerJob
from tasuki.worker.worker import Worker

__all__ = ["HandlerJob", "Worker"]
