"""Is the gateway, which takes requests over gRPC and HTTP, plans where they run, and streams their answers.

assemble.py         what a gateway has, and which flags turn it on; open this first
gateway.py          Gateway.generate: checks, tokenizes, admits and starts a request
gateway_server.py   the gateway as a component: ports, heartbeat, draining
gateway_limits.py   limits and periods that no flag sets
boxed_process.py    a process for jobs of strangers' making, which can be killed
boxed_worker.py     that process; it imports nothing of Pillion
http_api/           OpenAI's HTTP API
anthropic/          Anthropic's Messages, at the same port
responses/          OpenAI's Responses, at the same port
grpc_api/           the public gRPC service
admission/          API keys, tenants, bounds, quotas, queues
adapters/           names of LoRA adapters, which come and go
tokens/             tokenizer, chat template, detokenizer, stop strings
formats/            how models write reasoning and calls of tools, and how both are read
batches/            files of requests that run in the background
grammars/           the structure that an answer must have, as one grammar
prefix_pins/        prompts that are computed ahead, and pinned
pooling/            vectors of texts, as checkpoints want them
planning/           which workers serve a request, and where its prompt is split
read_ahead/         KV that is brought from lower tiers for requests that wait
recorder/           bundles of requests that failed or were slow
request/            the life of one request: state machine, calls to components, replays
ui/                 the page for people: its files, and what its live picture shows
links/              connections to the registry, KV nodes, prefill and decode workers

A gateway computes no model and holds no KV: it never imports torch, kernels or a backend.
"""
