"""Ranks and stages as forks; a pytest plugin."""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Iterator, Mapping, Sequence

import pytest


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """Fork the ranks and stages of workers in this process from a process that has imported torch (two seconds per
    import). Those of clusters are programs, as for users."""
    # Imported lazily: this plugin is also loaded for tests that only read sources.
    from lab.testbed.forks import ForkedComponent, component_forks
    from pillion.engine.ranks import rank_processes

    def start(
        command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: Mapping[str, str] | None
    ) -> ForkedComponent:
        _, _, module, *words = command
        return component_forks().program(module, words, os.environ if env is None else env, 1, 2, pass_fds)

    with pytest.MonkeyPatch.context() as patch:
        stand_in = types.SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
        patch.setattr(rank_processes, "subprocess", stand_in)
        yield
