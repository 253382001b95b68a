"""Kills workers that stay fenced; the supervisor then restarts them as after any death.

    the node names a worker --first time--> waiting --still named kill_after_s later--> killed, timed anew
                                               '--not named any more: it drained and continued, or died--> forgotten

The KV node decides which workers are fenced (I4), and is polled once a second. SIGKILL also ends stopped processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from pillion.cli.console import Notices
from pillion.errors import PillionError
from pillion.supervisor.probes import PROBE_TIMEOUT_S

FENCE_POLL_S = 1.0


class FenceWatch:
    """Tracks how long each worker has been fenced. Sans-IO (I9). A worker may stay fenced for ``kill_after_s``."""

    def __init__(self, kill_after_s: float) -> None:
        self.kill_after_s = kill_after_s
        self._since: dict[tuple[int, str], float] = {}

    def overdue(self, boot_epoch: int, components: Iterable[str], now: float) -> list[tuple[str, float]]:
        """Return the ids of the fenced ``components`` to kill, and for how many seconds each has been fenced.

        ``components``: ids that the node, in its boot ``boot_epoch``, reported as fenced at ``now``, in monotonic
        seconds. The time of a worker starts again after it was returned.
        """
        since = {(boot_epoch, component): self._since.get((boot_epoch, component), now) for component in components}
        due = [(key, now - since_s) for key, since_s in since.items() if now - since_s >= self.kill_after_s]
        for key, _ in due:
            del since[key]
        self._since = since
        return [(component, fenced_s) for (_, component), fenced_s in due]


async def watch_fences(target: str, kill_after_s: float, kill: Callable[[str], bool], notices: Notices) -> None:
    """Kill workers that stay fenced, until cancelled. While the node does not answer, no worker is killed, but its time
    continues to count.

    ``target`` is the node's address; ``kill`` kills a component by its id and returns True if it was running.
    """
    from pillion.kvstore.client.node_client import NodeClient

    watch, node = FenceWatch(kill_after_s), NodeClient(target, "supervisor")
    try:
        while True:
            await asyncio.sleep(FENCE_POLL_S)
            try:
                status = await node.status(timeout_s=PROBE_TIMEOUT_S)
            except PillionError:
                continue
            for component_id, fenced_s in watch.overdue(status.boot_epoch, status.fenced_components, time.monotonic()):
                if kill(component_id):
                    notices.say(f"{component_id} has been fenced for {fenced_s:.1f} s; killing it", "bold yellow")
    finally:
        await node.aclose()
