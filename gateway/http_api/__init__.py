"""HTTP port: OpenAI's API, vLLM's /tokenize, health and metrics. Start with http_server.py.

http_server.py       routes, and the server
http_connection.py   one connection, with limits for idle, slow and malicious clients
http_call.py         one call: its body, its response, disconnects, and writes that are blocked as cross-origin
public_url.py        the URL by which clients reach the port, and a proxy's path prefix
request_bodies.py    a body's bytes: decompressed, and without images that no model sees (no I/O)
http_errors.py       errors in the formats of OpenAI's and Anthropic's clients
model_calls.py       calls that a model answers, of all APIs: reads deltas, limits the rate of writes
output_parts.py      splits deltas into parts of an answer: reasoning, texts, tool calls
openai_api.py        handlers of OpenAI's endpoints
openai_fields.py     fields of bodies; add a new OpenAI field here first, unless it is a sampling option (types.py)
body_reading.py      parses and validates bodies, and repairs nulls and unknown names
openapi.py           /openapi.json, generated from those fields
docs_page.py         /docs, rendered from openapi.json
openai_requests.py   converts bodies to requests of the gateway, including chat messages
structure_fields.py  fields for structured outputs, of all APIs
structure_reading.py  parses them
tool_fields.py       fields of tools and tool choice, of all APIs
tool_reading.py      parses them
content_parts.py     parses parts of a message: texts, reasoning, calls and their results
openai_events.py     encodes deltas as events, or as one object
custom_tools.py      custom tools as functions with one argument, and their input extracted from calls
json_objects.py      JSON that is passed on as text, e.g. schemas of tools
openai_logprobs.py   log probabilities in OpenAI's formats
gathered_messages.py  consecutive messages joined into one

Policy is in gateway/gateway.py, which the gRPC service shares.
"""
