"""The `tasuki` command: one file per noun, for people and, with `--json`, for programs.

Stands on top and may import everything except `tasuki.testing`. Django, `tasuki.django` and the SQL store are imported
inside the functions that need them, so that `tasuki --help` answers at once.
"""
