"""The life of one request. Open request_machine.py first.

request_machine.py     the state machine of one answer: events in, actions out (no I/O)
events.py              its events and actions
choices.py             several answers to one prompt (no I/O)
runner.py              Generation: feeds events to the machines, performs actions, serves the reader
component_calls.py     the calls that actions ask for
assigned_load.py       what an answer has under way at each component (no I/O)
remote_span.py         a span on a prefill worker of another node
outbox.py              deltas that the reader has not taken yet (no I/O)
job.py                 a checked request, and the chain of its block hashes
message_bounds.py      what a request may hold, counted before objects are made of it
validation.py          checks of a request, and its defaults
request_telemetry.py   metrics and the trace span of a request

No protocol of clients comes in here.
"""
