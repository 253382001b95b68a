"""The cluster in simulated time: the production classes over components that are models on one clock.

    redis_model.py     RedisModel: Redis as Pillion uses it, with faults that can be switched.
    redis_keyspace.py  its keys, and the commands over them.
    redis_lua.py       runs Pillion's scripts themselves, in Lua 5.1.
    redis_client.py    redis-py's interface to it on an event loop, for RedisLink.

Nothing in a product's process imports this package.
"""
