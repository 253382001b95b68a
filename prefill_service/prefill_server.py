"""A prefill worker as a part: what ``pillion prefill`` and tests start and stop."""

from __future__ import annotations

from pillion.config import PrefillFlags
from pillion.engine.backends.loading import BackendFactory, load_model
from pillion.engine.worker.worker import Worker
from pillion.engine.worker.worker_server import WorkerServer, serve
from pillion.prefill_service.prefill_servicer import SERVICE_NAME, PrefillServicer


async def start_prefill(flags: PrefillFlags, *, backend_factory: BackendFactory = load_model) -> WorkerServer:
    """Start a prefill worker. Raises ConfigError for what cannot work."""
    worker = await Worker.start(
        flags,
        "prefill",
        max_num_batched_tokens=flags.max_num_batched_prefill_tokens,
        # Without chunks a span runs alone: nothing needs to fit beside it.
        max_num_seqs=min(flags.max_waiting_spans, flags.max_num_batched_prefill_tokens)
        if flags.enable_chunked_prefill
        else 1,
        backend_factory=backend_factory,
    )
    return await serve(worker, flags.listen, SERVICE_NAME, PrefillServicer(worker, flags.max_waiting_spans))
