"""Connects a gateway to other components. Open cluster.py first.

cluster.py        the registry's view, polled, and a link for every component in it; fetches
node_link.py      a session at a KV node; releases of tickets
prefill_link.py   calls that run a prefill range
decode_link.py    one connection to a decode worker for all streams
load_exchange.py  what this gateway's answers have under way, and, told by Redis, those of all others
outage.py         requests that wait for lost components
defects.py        what the tasks behind the links do about an exception that nobody foresaw

No decision is made here: the state machine of a request and the planner do that.
"""
