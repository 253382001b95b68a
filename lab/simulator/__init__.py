"""Runs the whole cluster in simulated time: the production components on one virtual clock, with faults that a seed
draws.

Open first: world.py, which runs one schedule; then virtual_loop.py, on which everything runs.

    schedule.py        what happens in a world, drawn from a seed: shape, requests, faults
    world.py           runs a schedule
    lives.py           a component, over all its lives
    components.py      the components' mains, with the flags of a shape
    supervision.py     the supervisors, and the processes that they start
    requests.py        a client's side of a request, compared with the reference
    faults.py          plays the faults
    checker.py         what must hold
    virtual_loop.py    the event loop: a clock that jumps, processes that can be killed and paused
    network.py         gRPC's channels and servers over connections that can be cut and reset
    machine.py         the attach socket and the memory behind it
    disks.py           disks that take time, stall, fill up and flip bits
    sim_threads.py     threads of simulated processes
    step_driver.py     a worker's step thread as a task
    hash_model.py      a model whose tokens and KV are hashes of the history
    redis_model.py     RedisModel: Redis as Pillion uses it, with faults that can be switched
    redis_keyspace.py  its keys, and the commands over them
    redis_lua.py       runs Pillion's scripts themselves, in Lua 5.1
    redis_client.py    redis-py's interface to it on an event loop, for RedisLink
    seams.py           where the simulation stands in for the machine
    shrink.py          the part of a failing schedule that matters
    mutations.py       defects made by hand, which the checks have to find
    campaign.py        runs seeds and prints what came of them

Another simulation, of a fleet of any size under a trace's load and without faults, is :mod:`lab.fleets`.
"""
