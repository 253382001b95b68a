"""Asyncio's side of a prefill or decode worker, and its step thread.

Open first: worker.py, which draws a worker's life; then worker_epoch.py, which connects the files below.

    worker.py         model, pool and node of a worker, through all its epochs
    worker_epoch.py   one epoch at the KV node: takes sequences, hands their updates to listeners
    step_cycle.py     schedule -> launch -> wait -> commit, without a thread
    step_loop.py      the step thread, which drives it
    node_updates.py   the scheduler's orders, sent to the KV node one batch at a time
    tickets.py        adopting tickets, and opening new ones for preempted streams
    adapter_loader.py brings adapters' files to the machine, and has them read and packed
    heartbeat.py      heartbeats to the node and the registry, and the lease that they renew
    step_meter.py     metrics of steps
    step_spans.py     trace spans of steps and streams
    worker_server.py  a worker with its gRPC server

No decision about what runs (pillion.engine.scheduling) and no message of a service (prefill_service, decode_service).
"""
