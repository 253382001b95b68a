"""Connections to other components. Open cluster.py first.

cluster.py        the registry's view, polled, and a link for every component in it; fetches
node_link.py      a session at a KV node; releases of tickets
prefill_link.py   calls that run a span
decode_link.py    one connection to a decode worker for all streams
load_exchange.py  what all gateways have under way, told by Redis
outage.py         requests that wait for lost components
defects.py        what the tasks behind the links do about an exception that nobody foresaw

No decision is made here: the state machine of a request and the planner do that.
"""
