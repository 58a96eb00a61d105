"""The store in Redis. All verbs are Lua (`lua/`) in one script, so that a turn is one call.

A verb of `RedisStore` makes a `ScriptCall` with the arguments of the script, which `scripts.RedisSession` sends; the call decodes
the reply. Imported only where it is used.

    store        `RedisStore`: opening, turns, and the verbs with their arguments and answers
    codec        encoding of the values in Redis
    scripts      the script, and the session that runs it
    connection   addresses, errors, settings, hints between servers
    key_check    keys that other programs spoilt, for `tasuki doctor`
    lua/         keys (all keys explained), rules, turn, then one file for each concern
"""
