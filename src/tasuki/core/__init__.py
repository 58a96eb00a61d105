"""The pure heart: jobs, leases, subjects, credit, and the machines that decide for server, worker and client.

Everything here is data and functions of data: `apply(event, now) -> commands`. No await, clock, random number or I/O;
time and chance are passed in. May import `tasuki.errors` and nothing else of tasuki.
"""
