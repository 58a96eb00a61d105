"""Asyncio plumbing that doors, workers and clients share: connections that speak messages.

May import `tasuki.wire` and what all may import (`core`, `errors`, `config`). See docs/decisions for why it is a part of its own.
"""

from tasuki.net.server_connection import ServerConnection
from tasuki.net.tcp_link import TcpLink, connect
from tasuki.net.tls import client_tls

__all__ = ["ServerConnection", "TcpLink", "client_tls", "connect"]
