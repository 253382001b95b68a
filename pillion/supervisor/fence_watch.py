"""Kills workers that stay fenced; the supervisor then restarts them as after any death.

    the node names a worker --first time--> waiting --still named kill_after_s later--> killed, timed anew
                                               '--not named any more: it drained and continued, or died--> forgotten

The KV node decides which workers are fenced (I4), so it is asked once a second. SIGKILL also ends stopped processes.
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
    """Tracks since when each worker is fenced (I9). A worker may stay fenced for ``kill_after_s``."""

    def __init__(self, kill_after_s: float) -> None:
        self.kill_after_s = kill_after_s
        self._since: dict[tuple[int, str], float] = {}

    def overdue(self, boot_epoch: int, components: Iterable[str], now: float) -> list[tuple[str, float]]:
        """Return the ids of the fenced ``components`` to kill, and for how many seconds each has been fenced.

        The node answered at ``now``, in monotonic seconds, in its boot ``boot_epoch``. A worker that is named again
        after it was returned is timed anew.
        """
        since = {(boot_epoch, component): self._since.get((boot_epoch, component), now) for component in components}
        due = [(key, now - seen_s) for key, seen_s in since.items() if now - seen_s >= self.kill_after_s]
        for key, _ in due:
            del since[key]
        self._since = since
        return [(component, fenced_s) for (_, component), fenced_s in due]


async def watch_fences(target: str, kill_after_s: float, kill: Callable[[str], bool], notices: Notices) -> None:
    """Kill workers that stay fenced, until cancelled. While the node does not answer, nobody is killed, and its last
    answer remains valid.

    ``target`` is the node's address; ``kill`` ends a component by its id and returns whether it was running.
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
