"""What tests and benchmarks start in order to have a real cluster: no product code, and never in the wheel.

- `cluster`: a whole cluster as a user starts it (`pillion serve`), its processes found by role; free ports, `wait_for`.
- `redis`: a redis-server of its own on a private Unix socket. `redis_kinds`: a Redis Cluster, a master with a replica
  and Sentinels, a server with TLS and users.
- `otlp`: a receiver of OpenTelemetry traces and metrics over real gRPC.
- `tiny_model`: small random checkpoints in Hugging Face folders. `toy_tokenizer`: tokenizers that a person can read.
- `plane_source`: a KV node that other nodes copy blocks from, as a process.
- `fake_cuda`: a CUDA driver in C for machines without a GPU.

Open `cluster` first. Modules here import `pillion` and each other, never `tests` or `benchmarks`. What a single test
package needs stays in `tests/support`.
"""
