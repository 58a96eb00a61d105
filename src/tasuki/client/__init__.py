"""The client: one async implementation and one thin synchronous face, with failover between servers.

May import `tasuki.wire`, `tasuki.blobs`, `tasuki.stores` (to submit straight to a store), and what all may import
(`core`, `errors`, `config`). Importing it never imports Django.
"""

from tasuki.client.aio import AsyncClient
from tasuki.client.handles import AsyncJobHandle
from tasuki.client.sync import Client, JobHandle

__all__ = ["AsyncClient", "AsyncJobHandle", "Client", "JobHandle"]
