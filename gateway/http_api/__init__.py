"""Serves the HTTP port: OpenAI's API, vLLM's /tokenize, health and metrics. Open http_server.py first.

http_server.py       the table of pages, and the server
http_connection.py   one connection: bounds of idle, slow and malicious clients
http_call.py         one call: its body, its response, the client that goes away; what foreign pages may not send
asked_address.py     the address and the path of a proxy under which clients ask the port
request_bodies.py    a body as it comes: inflated, and without images that no model sees (no I/O)
http_errors.py       errors as OpenAI's and Anthropic's clients know them
model_calls.py       calls that a model answers, at any of the APIs: their deltas, and the pace of writes
output_parts.py      from deltas to parts of an answer: what was thought, texts, calls of tools
openai_api.py        handlers of OpenAI's endpoints
openai_fields.py     the fields of bodies; a new OpenAI field goes here first, unless it is one of sampling
body_reading.py      reads a body as its type, judges its fields, and mends nulls and names that are not known
openapi.py           /openapi.json: what bodies may hold, made of those fields
docs_page.py         /docs: the page that is made of it
openai_requests.py   from bodies to requests of the gateway, the messages of chats included
structure_fields.py  the fields that ask for a structure of the answer, in the words of all APIs
asked_structure.py   reads them
tool_fields.py       tools, and the choice among them, in the shapes of all APIs
tool_reading.py      reads them
content_parts.py     the parts of a message: texts, thoughts, calls and their results
openai_events.py     from deltas to events, or to one object
custom_tools.py      custom tools as functions with one argument, and their input out of calls
json_objects.py      JSON that is passed on as text, such as schemas of tools
openai_logprobs.py   log probabilities in OpenAI's shapes
gathered_messages.py  messages that are made of several of a client's

Policy never comes in here: it belongs to gateway/gateway.py, which the gRPC service shares.
"""
