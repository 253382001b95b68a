"""A decode worker as a part: what ``pillion decode`` and tests start and stop."""

from __future__ import annotations

from pillion.config import DecodeFlags
from pillion.decode_service.decode_servicer import SERVICE_NAME, DecodeServicer
from pillion.engine.backends.loading import BackendFactory, load_model
from pillion.engine.worker.worker import Worker
from pillion.engine.worker.worker_server import WorkerServer, serve


async def start_decode(flags: DecodeFlags, *, backend_factory: BackendFactory = load_model) -> WorkerServer:
    """Start a decode worker. Raises ConfigError for what cannot work."""
    worker = await Worker.start(
        flags,
        "decode",
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_seqs=flags.max_num_seqs,
        target_itl_ms=flags.target_itl_ms,
        num_speculative_tokens=flags.num_speculative_tokens,
        backend_factory=backend_factory,
    )
    servicer = DecodeServicer(worker, flags.max_num_seqs + flags.max_waiting_seqs)
    return await serve(worker, flags.listen, SERVICE_NAME, servicer)
