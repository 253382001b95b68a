"""The names of LoRA adapters: which digest each means, for which model, and who may change that.

name_table.py       what every name means now, sans-IO
adapter_names.py    loads and unloads adapters, and shares their names with the other gateways
adapter_spread.py   brings their files to the machines of KV nodes

Behind the gateway nobody knows names: a request's name becomes the digest of its adapter when it is checked, and keeps
it whatever the name means later.
"""
