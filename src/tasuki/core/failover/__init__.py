"""Decisions about jobs on node agents, without a server: contract, choice of nodes, failover. Pure.

Imported by `agent`, `dispatcher` and `client.agents`. A client applies events to a `FailoverPlan` and executes its commands; a
dispatcher uses the same meaning of refusals and the same nodes.

    agent_protocol.py    contract of agents: input hash, states, markers    events.py  events and commands of a plan, refusals
    nodes.py             breakers, ranking, choice of a node                plan.py    plan of one job over several nodes
    registry_records.py  jobs of agents in a store that they share
"""
