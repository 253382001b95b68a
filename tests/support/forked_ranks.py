"""Ranks and stages as forks; pytest loads this module as a plugin."""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Iterator, Mapping, Sequence

import pytest


@pytest.fixture
def forked_ranks() -> Iterator[None]:
    """The ranks and stages of workers in this process are forks of a process that has their packages, as long as a test
    runs: each would import torch, two seconds of a core. Those of clusters are programs, as for users."""
    # This plugin is loaded for tests that read sources alone, too.
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
