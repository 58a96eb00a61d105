"""The broker: all decisions of one server, as a pure state machine.

`Broker.apply(event, now)` takes connections, messages and the ends of turns, and returns commands; `Broker.next_turn(now)`
returns the next transaction for the store. Drivers are `tasuki.server`, the test harness and the simulator; doors read some of
the state. Nothing here imports more than the rest of `tasuki.core`, and each module only those below it:

    broker            the event loop
    upkeep            the leader's turns: expired leases, delayed jobs, retention, blobs
    cluster           hints from other servers, polls in case one was lost
    worker_messages   conversations with workers: credit, leases, deliveries, reports
    client_messages   conversations with clients: submits, watches, cancels, requests; blob transfers
    publish_subscribe messages that are not stored: subscribing, publishing, queue groups
    log_reads         a client's reads of a log that a worker has
    caches            files that clients put and workers keep; the hash and size of those that jobs name
    authentication    Hello, tokens, enrolment of workers
    state             the state that these share: sessions, credit, watchers
    other_servers     the live servers beside this one, and the hint that they get after a turn
    turn_builder      the next turn: questions for the store, and the functions that get the answers
    routes            ready jobs of routed subjects, and the workers that policies chose for them
    subscriptions     patterns of the workers, and what became ready for each since its workers looked
    events            events and commands

A conversation asks the store with `state.builder.ask(verb, items, reply, failed)`; `reply` runs after the commit of the turn.
"""
