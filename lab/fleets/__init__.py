"""Simulates a fleet of up to thousands of workers: which requests would see what. Open world.py first.

    command.py        `python -m lab.fleets`: options to studies, tables and files
    studies.py        what a change of a flag costs, and how many workers it takes
    figures.py        what clients saw, in numbers
    world.py          FleetWorld: gateways, workers and nodes; runs a load
    traffic.py        requests, and how their clients saw them
    sim_gateway.py    a gateway: production admission, candidates and planner
    fleet_request.py  a request: the production machine, and the calls that it asks for
    sim_worker.py     a worker: the production scheduler; runs of plain steps as one event
    prefix_store.py   the blocks of KV nodes, and the index
    site.py           what all gateways reach
    clock.py          the queue of events

Here are no faults, no messages and no bytes: decisions are production's, and everything else is time.
"""
