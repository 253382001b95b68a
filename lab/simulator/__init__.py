"""Deterministic simulation of the whole cluster: production components on one virtual clock, with faults drawn from a
seed.

Open first: world.py, which runs one schedule; then virtual_loop.py, on which everything runs.

    schedule.py        what happens in a world, drawn from a seed: shape, requests, faults
    world.py           runs a schedule
    lives.py           a component, over all its lives
    components.py      the components' mains, with the flags of a shape
    supervision.py     the supervisors, and the processes that they start
    requests.py        the client of a request, which compares answers with the reference
    faults.py          plays the faults
    checker.py         the invariants
    virtual_loop.py    the event loop: a clock that jumps, processes that can be killed and paused
    network.py         gRPC channels and servers over connections that can be cut and reset
    machine.py         the attach socket and the memory behind it
    disks.py           disks that take time, stall, fill up and flip bits
    sim_threads.py     threads of simulated processes
    step_driver.py     a worker's step thread as a task
    hash_model.py      a model whose tokens and KV are hashes of the history
    redis_model.py     RedisModel: Redis as Pillion uses it, with switchable faults
    redis_keyspace.py  its keys, and the commands over them
    redis_lua.py       Pillion's own scripts, in Lua 5.1
    redis_client.py    redis-py's interface to it on an event loop, for RedisLink
    seams.py           the patches that replace the machine by the simulation
    shrink.py          minimizes a failing schedule
    mutations.py       mutants of the product that the checks must find
    campaign.py        runs seeds and prints findings

:mod:`lab.fleets` simulates fleets of any size under a trace, without faults.
"""
