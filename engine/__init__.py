"""Engine of prefill and decode workers, from the schedule of a step to its sampled tokens.

    assemble_worker.py  assembles a worker: model, features and connection to a KV node
    load_model.py       loads the model that a worker's flags name, on a backend
    scheduling/    which tokens run in the next step, and which sequence owns which slot; sans-IO
    worker/        asyncio side of a worker: connection to a KV node, step thread, tickets, heartbeats
    streams/       gateways' access to a worker's streams: connections, submits and deltas
    models/        model families, and the decoder that they share
    checkpoints/   weights and configurations on disk
    quantized/     quantized checkpoints, and quantization of plain weights
    sampling/      logits to tokens
    adapters/      LoRA adapters;  gpu_adapters/: on GPUs
    grammars/      masks of the tokens that grammars allow
    drafts/        speculative decoding: draft tokens, verified by steps
    states/        check of flags for hybrid models
    gpu_states/    layers with recurrent state on GPUs
    encoders/      bidirectional models: vectors and labels of texts, without a KV cache
    ranks/         tensor parallelism: several processes, each with a shard of the model;  gpu_ranks/: on GPUs
    stages/        pipeline parallelism of prefill workers;  gpu_stages/: on GPUs
    backends/      execution of a step on a device: torch, cpu, gpu

Start with scheduling/scheduler.py for decisions, and worker/step_loop.py for the loop schedule -> launch -> wait ->
commit. The workers' processes are in prefill_service and decode_service, and the shared KV pool in kvstore.
"""
