"""Test tools that ship with tasuki: conformance suites of the contracts, and the simulator (`sim/`).

May import everything below `tasuki.cli`; only `tasuki sim` imports it. Each contract has its suite, for its implementations here
and elsewhere: `store_suite` (cases in `store_clients`, `store_leases`, `store_ready`, `store_reports`, `store_leader`,
`store_caches`, on the `Stage` of `store_stage`), `blob_suite`, `coords_suite`.

    clocks          a clock that a test moves
    sim/            a whole system on one heap of events, run from a seed
"""
