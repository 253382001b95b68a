"""Jobs for the adapter reader process, with failures on demand. Imports no torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from pillion.engine.adapters.adapter_forms import NO_BYTES, Bytes
from pillion.engine.adapters.adapter_store import AdapterJobs
from pillion.errors import Overloaded


@dataclass(frozen=True, slots=True)
class FakeJobs(AdapterJobs):
    """Jobs; ``greeting`` shows the description passed to the process."""

    greeting: str

    def say(self) -> tuple[list[Any], Bytes]:
        """Return the greeting, the pid and its niceness, and some bytes."""
        print("a line that is no answer")
        return [self.greeting, os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)], np.arange(10**6).view(np.uint8)

    def take(self, size_bytes: int) -> tuple[list[Any], Bytes]:
        """Allocate this memory."""
        return [np.ones(size_bytes, np.uint8).sum().item()], NO_BYTES

    def hang(self) -> tuple[list[Any], Bytes]:
        """Never return."""
        time.sleep(3600)
        return [], NO_BYTES

    def compute(self, seconds: float) -> tuple[list[Any], Bytes]:
        """Compute for this time, in small operations."""
        end, turns = time.process_time() + seconds, 0
        while time.process_time() < end:
            turns += 1
        return [turns], NO_BYTES

    def refuse(self) -> tuple[list[Any], Bytes]:
        raise Overloaded("there is no room")

    def fail(self) -> tuple[list[Any], Bytes]:
        raise KeyError("a defect")
