"""The gateway: accepts requests over gRPC and HTTP, plans where they run, and streams their answers.

assemble.py         a gateway's parts, and the flags that enable them; open this first
gateway.py          Gateway.generate: checks, tokenizes, admits and starts a request
gateway_server.py   the gateway as a component: ports, heartbeat, draining
gateway_limits.py   limits and periods that no flag sets
boxed_process.py    a killable process for untrusted jobs
boxed_worker.py     that process's program, which imports nothing of Pillion
http_api/           OpenAI's HTTP API
anthropic/          Anthropic's Messages, at the same port
responses/          OpenAI's Responses, at the same port
grpc_api/           the public gRPC service
admission/          API keys, tenants, limits, quotas, queues
adapters/           names of LoRA adapters, loaded at run time
tokens/             tokenizer, chat template, detokenizer, stop strings
formats/            parsers of reasoning and tool calls, per model format
batches/            files of requests that run in the background
grammars/           structured output: the grammar of an answer
prefix_pins/        prompts computed ahead and pinned
pooling/            embeddings, classification and scoring of texts
planning/           which workers serve a request, and where its prompt is split
read_ahead/         fetches of KV from lower tiers for queued requests
recorder/           bundles of requests that failed or were slow
request/            the life of one request: state machine, calls to components, replays
ui/                 the web page: its files, and its live data
links/              connections to the registry, KV nodes, prefill and decode workers

A gateway computes no model and holds no KV: it imports neither torch nor a backend.
"""
