"""The ways in: thin drivers between a transport and the server's verbs.

A door accepts, authenticates, limits and translates; what to do is decided in `tasuki.core`. May import `tasuki.wire`,
`tasuki.server`, and what all may import (`core`, `errors`, `config`).
"""
