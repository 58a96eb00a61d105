"""Where doors, store and duties meet: one process that holds connections and credits, and no state of its own.

May import `tasuki.stores`, `tasuki.coords`, `tasuki.blobs`, and what all may import (`core`, `errors`, `config`).
"""
