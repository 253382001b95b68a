"""The HTTP port: OpenAI's and Anthropic's APIs, vLLM's /tokenize, health and metrics. Open http_server.py first.

http_server.py       the table of pages, and the server
http_connection.py   one connection: bounds of idle, slow and malicious clients
http_call.py         one call: its body, its response, the client that goes away
cross_origin.py      what foreign pages make a browser send
http_errors.py       errors as OpenAI's and Anthropic's clients know them
model_calls.py       calls that a model answers, at any of the doors; the pace of writes
delta_reader.py      deltas of one call with one prompt or several
output_parts.py      from deltas to parts of an answer: what was thought, texts, calls of tools
openai_api.py        handlers of OpenAI's endpoints
adapters_api.py      handlers of the endpoints that load and unload adapters
prefixes_api.py      handlers of /v1/cache/prefixes
batches_api.py       handlers of /v1/files and /v1/batches
batch_calls.py       the lines of batches, served like calls
multipart.py         the form in which a file comes
openai_fields.py     the fields of bodies; a new OpenAI field goes here first
openapi.py           /openapi.json: what bodies may hold, made of those fields
docs_page.py         /docs: the page that is made of it
openai_requests.py   from bodies to requests of the gateway
openai_shapes.py     the shape of an answer, in OpenAI's words or vLLM's
openai_events.py     from deltas to events, or to one object
json_objects.py      JSON that is passed on as text, such as schemas of tools
openai_logprobs.py   log probabilities in OpenAI's shapes
anthropic_api.py     handlers of Anthropic's endpoints
anthropic_fields.py  the fields of their bodies
anthropic_requests.py  from bodies to requests of the gateway
anthropic_events.py  from deltas to events, or to one message
gathered_messages.py  messages that are made of several of a client's
responses_api.py     the handler of OpenAI's Responses
responses_fields.py  the fields of its bodies
responses_requests.py  from bodies to requests of the gateway
responses_events.py  from deltas to events, or to one response
ui_api.py            handlers of the page for people, and of the live picture that it shows

Policy never comes in here: it belongs to gateway/gateway.py, which the gRPC service shares.
"""
