"""Simulation of a fleet of up to thousands of workers in virtual time. Open world.py first.

    command.py        `python -m lab.fleets`: options to studies, tables and files
    studies.py        the effect of a flag, and the number of workers needed
    figures.py        latencies and goodput as clients saw them
    world.py          FleetWorld: gateways, workers and nodes; runs a load
    traffic.py        requests, and how their clients saw them
    sim_gateway.py    a gateway: production admission, candidates and planner
    fleet_request.py  a request: the production machine, and its calls
    sim_worker.py     a worker: the production scheduler; runs of plain steps as one event
    prefix_store.py   the blocks of KV nodes, and the index
    site.py           state that all gateways share
    clock.py          the event queue

No faults, messages or bytes: decisions are production's, all else is time.
"""
