"""What must survive: the contract of the store (`store.py`), its back ends, and the front that commits in groups.

A store speaks the domain in a dozen batch-first verbs. May import `tasuki.core`, `tasuki.errors` and `tasuki.config`;
`sql*.py` alone also imports Django and `tasuki.django.models`, and is itself imported only where the store is SQL.
"""
