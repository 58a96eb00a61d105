"""The scheduler's decisions, pure: nominal times of definitions, and the runs that the leader makes of them and of events.

    schedule   schedules as texts, their nominal times in a time zone, what happens when clocks change
    firing     definitions, events, and the runs that are due: catch-up, overlap, ids
    leader     runs that were stored ahead: which worker gets them, and who is told to start them
    orders     orders of a leader to workers: which of them are obeyed
    sub_leader members that are taken to be dead, and who asks first for the leader's lock
    continuation   whether a worker that was cut off or detached may continue its runs
    thresholds settings that are in force without a restart: defaults, ranges, combinations

Stores call `firing` in the leader's turn (`stores/sql/fire.py`, `stores/memory`); `tasuki.django` checks and previews with it.
May import the rest of `core`.
"""
