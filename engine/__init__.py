"""Is the engine that prefill and decode workers share, from a step's schedule to the tokens that it samples.

    assemble_worker.py  a worker put together: its model, what it has beside it, and its place at a KV node
    load_model.py       the model that a worker's flags ask for, and what runs it
    scheduling/    which tokens run in the next step, and which sequence owns which slot; sans-IO
    worker/        asyncio's side of a worker: its place at a KV node, the step thread, tickets, heartbeats
    streams/       how gateways reach a worker's streams: connections, submits and deltas
    models/        model families, and the decoder that all of them share
    checkpoints/   weights and configurations on disk
    quantized/     checkpoints quantized, and plain weights that are quantized here
    sampling/      logits to tokens
    adapters/      LoRA: small matrices that change the model for the requests that name them;  gpu_adapters/: on GPUs
    grammars/      which tokens an answer may go on with
    drafts/        speculative decoding: draft tokens of next tokens, which steps judge
    states/        the check of flags that models whose layers carry states do not go with
    gpu_states/    layers with states on GPUs
    encoders/      models whose tokens all see each other: vectors and labels of whole texts, without any cache
    ranks/         workers of several processes, each with a share of the model;  gpu_ranks/: those on GPUs
    stages/        prefill workers of several processes, each with some of the layers;  gpu_stages/: those on GPUs
    backends/      a step on a device: torch, cpu, gpu

Open first: scheduling/scheduler.py for a decision, worker/step_loop.py for the loop schedule -> launch -> wait ->
commit. It has no process of its own (prefill_service, decode_service), no HTTP, and no block's life beyond this worker
(kvstore).
"""
