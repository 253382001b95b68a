"""Admission decides who may send requests, how many at once, and which is next. Open admission.py first.

admission.py       bounds of the gateway and of tenants, and a queue for each model
giving_way.py      who gives way where a bound is met (no clock, no I/O)
answer_times.py    how long a request takes once it has its turn (no clock, no I/O)
turns.py           whose turn it is in such a queue, or at the threads: fair between tenants (no clock, no I/O)
tenants.py         what a tenant may use, what is held of the bounds, and the salt that keeps its cache apart
api_keys.py        the file of tenants and hashed keys
quotas.py          token buckets of one gateway (no clock, no I/O)
shared_quotas.py   quotas over all gateways, counted in Redis

No request is planned or run here.
"""
