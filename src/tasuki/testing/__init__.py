"""Shipped for those who test against tasuki: the conformance suites of the contracts, and fakes for clock and net.

May import everything below `tasuki.cli`; nothing of tasuki imports it.
"""
