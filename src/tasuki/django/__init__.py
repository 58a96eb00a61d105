"""The Django app: models and migrations (the one source of the SQL schema) and what a Django project uses of tasuki.

`models.py` imports nothing of tasuki but `core`, since the SQL store stands on it; the rest of the app stands on top
and may import everything except `tasuki.cli` and `tasuki.testing`.
This file imports nothing: `django.setup()` has to come first.
"""
