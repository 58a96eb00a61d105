"""The store in Redis. All verbs are Lua (`lua/`) in one script, so that a turn is one call.

A verb of `RedisStore` is built by `verbs` into the arguments of the script, sent by `scripts.RedisSession`, and its reply decoded
by the same call. Imported only where it is used.

    store        `RedisStore`: opening, turns, and the list of verbs
    verbs        arguments and answers of each verb
    codec        encoding of the values in Redis
    scripts      the script, and the session that runs it
    connection   addresses, errors, settings, hints between servers
    lua/         keys (all keys explained), rules, turn, then one file for each concern
"""
