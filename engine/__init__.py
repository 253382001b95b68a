"""The engine: what a prefill and a decode worker share, from a step's schedule to the tokens that it samples.

    scheduling/    which tokens run in the next step, and which sequence owns which slot; sans-IO
    worker/        asyncio's side of a worker: its place at a KV node, the step thread, tickets, heartbeats
    models/        model families, and the decoder that all of them share
    checkpoints/   weights and configurations on disk
    sampling/      logits to tokens
    adapters/      LoRA: small matrices that change the model for the requests that name them
    grammars/      which tokens an answer may go on with
    ranks/         a rank's share of weights and adapters, and the memory that the ranks of a worker have in common
    backends/      a step on a device: torch, cpu, gpu

Open first: scheduling/scheduler.py for a decision, worker/step_loop.py for the loop schedule -> launch -> wait ->
commit. No gRPC service (prefill_service, decode_service), no HTTP, and no block's life beyond this worker (kvstore).
"""
