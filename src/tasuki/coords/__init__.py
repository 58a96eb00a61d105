"""Coordination between servers: who is alive, who leads, which workers get no more work. Nothing here is authoritative.

Used by `tasuki.server`; may import `tasuki.core`, `tasuki.errors` and `tasuki.config`, never Django, and drivers only when a
connection is made. A server beats once a second and reads the live members from the answer; the elected leader registers its
epoch in the store, which alone decides what it may write.

    coordination   the contract, and the implementation in memory
    sql            PostgreSQL (`statements/`)
    redis          Redis, for servers whose store it is (`lua/`)
    scheduler_redis  Redis beside a SQL store, on the keys `scheduler:…`
"""
