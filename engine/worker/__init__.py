"""The event loop's side of a prefill or decode worker, and its step thread.

Start with worker.py, a worker's life cycle; then worker_epoch.py, which connects the files below it.

    worker.py            a worker: model, pool and node, over all its epochs
    worker_epoch.py      one epoch at the KV node: runs sequences, passes their updates to listeners
    step_loop.py         schedule -> launch -> wait -> commit, and the step thread, which drives it
    node_updates.py      the scheduler's orders, sent to the KV node one batch at a time
    tickets.py           adopting tickets, and opening new ones for preempted streams
    heartbeat.py         heartbeats to the node and the registry, and the lease that they renew
    worker_server.py     a worker with its gRPC server
    worker_telemetry.py  metrics of steps, and trace spans of steps and streams

Scheduling is in pillion.engine.scheduling, the services' messages in prefill_service and engine.streams.
"""
