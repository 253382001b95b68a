"""Counts of this process's compilations, and Triton cache keys that depend on the sources alone.

A kernel's key includes the constants of the functions that it calls, but only of those whose own keys are known by then
(triton/runtime/jit.py, ``DependenciesFinder._update_hash``; read in 3.6 and 3.7). So it depended on earlier launches,
and kernels compiled by another process were not found.
"""

from __future__ import annotations

import collections
from typing import Any


def stable_keys() -> None:
    """Compute the keys of the functions that a kernel calls before the kernel's own."""
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash
    if getattr(update, "stable", False):
        return

    def update_after_key(self: Any, function: Any) -> None:
        _ = function.cache_key
        update(self, function)

    update_after_key.stable = True  # type: ignore[attr-defined]
    DependenciesFinder._update_hash = update_after_key


def counted_kernels() -> collections.Counter[str]:
    """Count the kernels of this process from now on, compiled and cached."""
    from triton import knobs

    counts: collections.Counter[str] = collections.Counter()

    def count(*, cache_hit: bool, **more: Any) -> None:
        counts["in the cache" if cache_hit else "compiled"] += 1

    knobs.compilation.listener = count
    return counts
