"""Keeps the names of LoRA adapters: which digest each means, for which model, and who may change that.

name_table.py        what every name means now (sans-IO); open it first
adapter_names.py     loads and unloads adapters, and shares their names with the other gateways
adapter_spread.py    brings the adapters' files to the machines of KV nodes, from which workers get them
adapters_api.py      handlers of the pages that load and unload adapters
adapter_servicer.py  the gRPC calls that load and unload adapters

Behind the gateway nobody knows names: a request's name becomes the digest of its adapter when it is checked, and keeps
it whatever the name means later.
"""
