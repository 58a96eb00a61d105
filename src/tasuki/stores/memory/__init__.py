"""The store in memory: the model that other stores are compared with, used by tests and the simulator.

A verb changes dictionaries at once; a turn that fails puts them back. May import `core`, `errors` and the rules of `stores`.

store         `MemoryStore`: the verbs that change jobs
definitions   definitions and events, and the verb that fires them
records       jobs, blobs and tokens with their indexes; all other verbs
"""
