"""Engine shared by prefill and decode workers, from the schedule of a step to its sampled tokens.

    assemble_worker.py  assembles a worker: its model, its features, and its KV node
    load_model.py       loads the model of a worker's flags, with its backend
    scheduling/    which tokens run in the next step, and which sequence owns which slot; sans-IO
    worker/        asyncio side of a worker: connection to a KV node, step thread, tickets, heartbeats
    streams/       gateways' access to a worker's streams: connections, submits and deltas
    models/        model families, and the decoder that they share
    checkpoints/   weights and configurations on disk
    quantized/     quantized checkpoints, and quantization of plain weights
    sampling/      logits to tokens
    adapters/      LoRA: low-rank changes of the model for the requests that name them;  gpu_adapters/: on GPUs
    grammars/      allowed next tokens of an answer
    drafts/        speculative decoding: draft tokens, verified by steps
    states/        check of flags for hybrid models
    gpu_states/    layers with states on GPUs
    encoders/      bidirectional models: vectors and labels of whole texts, without a cache
    ranks/         tensor parallelism: several processes, each with a shard of the model;  gpu_ranks/: on GPUs
    stages/        pipeline parallelism of prefill workers;  gpu_stages/: on GPUs
    backends/      a step on a device: torch, cpu, gpu

Start with scheduling/scheduler.py for decisions, and worker/step_loop.py for the loop schedule -> launch -> wait ->
commit. Processes are in prefill_service and decode_service, blocks beyond this worker in kvstore.
"""
