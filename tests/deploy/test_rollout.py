"""The chart's pods as processes: what replaces them under load loses no stream, and they start and end in order."""

from __future__ import annotations

import asyncio
import pathlib
import sys
import tempfile

import pytest

pytest.importorskip("helm_python", reason="Helm's library has no wheel for this machine")

from tests.deploy.rollout import replay, tiny_model, values_of
from tests.support.kube_runtime import ProcessRuntime


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8 to be loopback")
async def test_pods_are_replaced_under_load() -> None:
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        folder = pathlib.Path(name)
        model = await asyncio.to_thread(tiny_model, folder)
        await replay(ProcessRuntime(folder), values_of(model), "tiny", print)
