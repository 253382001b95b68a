"""How often the gateway writes. A write costs more than a token: the wake-up, the framing, the system call.

Each stream writes as soon as it has something, but no sooner after its last write than its share of MAX_WRITES_PER_S;
what comes meanwhile goes with the next write. So nothing is held back as long as all streams together bring fewer
messages than that, and beyond it the core carries more tokens instead of more system calls.
"""

from __future__ import annotations

import asyncio
import time

# Half a core's worth of writes.
MAX_WRITES_PER_S = 12_000


class WritePacer:
    """Of one process: ``with pace`` is one more stream that writes."""

    def __init__(self) -> None:
        self.streams = 0

    def __enter__(self) -> WritePacer:
        self.streams += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.streams -= 1

    async def rest(self, wrote: float) -> None:
        """Until a stream that wrote at ``wrote`` (monotonic seconds) may write again; mostly that is at once."""
        left_s = wrote + self.streams / MAX_WRITES_PER_S - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
