"""Who is alive, and who leads: the contract of the coordination (`coordination.py`) and its back ends.

May import `tasuki.core`, `tasuki.errors` and `tasuki.config`; never Django, and psycopg only when a connection is made.
"""
