"""Makes servers, clusters and models for tests and benchmarks. Nothing here is product code or in the wheel.

- `cluster` starts a whole cluster as a user does (`pillion serve`) and finds its processes by role.
- `release` knows the commit of the last release, takes its tree out of git, and keeps the shape of its protos.
- `hosts` starts several KV nodes with their workers on one machine, as if they were on several hosts.
- `forks` starts components and clusters as forks of one process that has imported what they need.
- `triton_interpreter` makes Triton's interpreter quicker, in which kernels run without a GPU.
- `nested_forks` gives a cluster that is a fork a fork server that is one, too.
- `networks` makes hosts of network namespaces, with links between them that are long, narrow, lossy or cut.
- `wire` is the process that carries their packets.
- `faults` kills or stops processes at named points of their code.
- `ports` are ports that nobody else takes before they are used.
- `certs` makes certificates for development and tests, by openssl.
- `conditions` waits for a condition with a bound, blocking or on the event loop.
- `redis` starts a redis-server on a private Unix socket.
- `redis_kinds` starts a Redis Cluster, a master with a replica and Sentinels, or a server with TLS and users.
- `s3_service` starts an S3 service, with a relay before it that does to its answers what networks do.
- `otlp` is a receiver of OpenTelemetry traces over real gRPC.
- `tiny_model` writes small random checkpoints into Hugging Face folders.
- `scripted_model` writes checkpoints whose answers are written beforehand, with calls of tools.
- `draft_models` makes draft models of a model's first layers, and models that such drafts draft well.
- `eagle_heads` makes random EAGLE-3 heads for a model.
- `recorded_requests` asks for answers of every kind from a cluster that records them, and replays their bundles.
- `random_adapter` makes random LoRA adapters in the form that backends take.
- `plain_model` makes a plain Hugging Face folder of a GGUF file, such as the demo model's, for other programs.
- `toy_tokenizer` makes tokenizers that a person can read.
- `plane_source` is a KV node, in a process of its own, that other nodes copy blocks from.
- `attention_reference` computes paged attention in plain torch; it is the oracle of every kernel.
- `gpu_reference` computes in plain torch what the smaller GPU kernels do.
- `fake_cuda` is a CUDA driver in C for machines without a GPU.

Open `cluster` first. Modules here import `pillion` and each other, never `tests` or others of the laboratory. Helpers
of tests alone stay in `tests/support`.
"""
