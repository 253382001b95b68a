"""Servers, clusters and models for tests and benchmarks; not product code.

- Clusters: `cluster` (`pillion serve` as a user starts it), `hosts` (several KV nodes as if on several hosts),
  `networks` (network namespaces with slow, lossy or cut links; `wire` carries their packets), `forks` and
  `nested_forks` (components as forks of one process, with fork servers that are forks as well), `release` (the tree and
  protos of the last release).
- Faults: `faults` kills or stops processes at named points of their code; `defaults` changes limits that no flag sets.
- Services: `redis` (a private redis-server), `redis_kinds` (Redis Cluster, Sentinels, TLS), `s3_service` (S3 behind a
  faulty relay), `otlp` (a receiver of traces), `plane_source` (a KV node that others copy from), `certs`, `ports`.
- Models: `tiny_model` (random checkpoints), `scripted_model` (predefined answers with tool calls), `draft_models`,
  `eagle_heads`, `random_adapter` (LoRA), `plain_model` (a Hugging Face folder of a GGUF file), `toy_tokenizer`.
- References: `attention_reference` and `gpu_reference` (kernels in plain torch), `fake_cuda` (a CUDA driver in C),
  `triton_interpreter` (a faster one).
- `conditions` (bounded waits), `recorded_requests` (requests of every kind, recorded and replayed),
  `admitted` (requests without a gateway).

Open `cluster` first. Modules import `pillion` and each other, never `tests` or other parts of the laboratory. Helpers
used only by tests are in `tests/support`.
"""
