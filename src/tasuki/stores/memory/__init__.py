"""The store in memory: the model that other stores are compared with, used by tests and the simulator.

store     `MemoryStore`: the verbs that change jobs
records   jobs, blobs and tokens with their indexes; all other verbs
"""
