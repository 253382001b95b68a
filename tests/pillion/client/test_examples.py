"""The programs in examples/, run unchanged against the real components."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator

from lab.testbed.tiny_model import save_model
from tests.support.components import Components, running_components

ROOT = pathlib.Path(__file__).resolve().parents[3]


@contextlib.asynccontextmanager
async def components_of(folder: pathlib.Path) -> AsyncIterator[Components]:
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 512}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model) as components:
            yield components


async def run(folder: pathlib.Path, *words: str, asked: str = "") -> str:
    """Return the standard output of a Python program in ``folder``."""

    def work() -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=folder, env=environ, input=asked, capture_output=True, text=True, timeout=200, check=False
        )

    done = await asyncio.to_thread(work)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_examples_run(tmp_path: pathlib.Path) -> None:
    examples = ROOT / "examples"
    assert {path.name for path in examples.glob("*.py")} - {"offline.py"} == {"batch.py", "first_of_two.py"}
    async with components_of(tmp_path) as components:
        target = components.gateway.grpc_address
        batch, race = await asyncio.gather(
            run(tmp_path, str(examples / "batch.py"), target, asked="Once\n" + "x" * 600 + "\nTwice\n"),
            run(tmp_path, str(examples / "first_of_two.py"), target),
        )
        status = await components.client.status()
        assert status.active_requests == 0
    first, wrong, third = (json.loads(line) for line in batch.splitlines())
    assert (first["prompt"], third["prompt"]) == ("Once", "Twice")
    assert "600 in your prompt" in wrong["error"]
    assert len(race.splitlines()) == 1
