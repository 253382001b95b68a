"""Adds models whose layers carry a state to simulated fleets (docs/decisions/states.md).

fleet_states.py  what the room enters: nodes, index and steps of a fleet whose model has states
state_store.py   the blocks and states of a KV node, in the production ledger
places.py        where a worker's prompts leave states
"""
