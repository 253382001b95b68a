"""The life of one request. Open request_machine.py first.

request_machine.py     the state machines of an answer, and of several: events in, actions out (no I/O)
events.py              its events and actions
request_runner.py      feeds events to the machines, performs actions, merges what the reader has not taken yet
component_calls.py     the calls that actions ask for, prefill ranges at other nodes included
admitted_request.py    a checked request, and the chain of its block hashes
client_json.py         JSON that clients send as text: counted, checked, parsed
refusals.py            rejected requests by tenant and client: a table, log lines, spans
validation.py          checks of a request, from the count of what it holds on, and its defaults
request_telemetry.py   metrics and the trace span of a request

Independent of the clients' protocols.
README.md has the lifecycle, the invariants and the losses that race.
"""
