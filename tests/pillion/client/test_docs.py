"""The code of docs/sdk.md and the programs in examples/, run as they are against the real components."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator

from testbed.tiny_model import save_model
from tests.support.components import Components, running_components

ROOT = pathlib.Path(__file__).resolve().parents[3]
TARGET, MODEL = '"127.0.0.1:50051"', 'LLM("demo"'


@contextlib.asynccontextmanager
async def components_of(folder: pathlib.Path) -> AsyncIterator[Components]:
    model = {"model": str(save_model(folder / "tiny")), "dtype": "float32", "max_model_len": 512}
    with tempfile.TemporaryDirectory(prefix="pil-") as short:
        async with running_components(pathlib.Path(short), model=model) as components:
            yield components


async def run(folder: pathlib.Path, *words: str, asked: str = "") -> str:
    """Standard output of a Python program in ``folder``."""

    def work() -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=folder, env=environ, input=asked, capture_output=True, text=True, timeout=100, check=False
        )

    done = await asyncio.to_thread(work)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_the_code_of_the_page_runs(tmp_path: pathlib.Path) -> None:
    page = (ROOT / "docs" / "sdk.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    assert code.count(TARGET) == 3
    assert code.count(MODEL) == 1
    for name in ("ca.pem", "client.pem", "client.key"):
        (tmp_path / name).write_text("-----BEGIN CERTIFICATE-----, read when a connection is made")
    async with components_of(tmp_path) as components:
        options = ", dtype='float32', max_model_len=512, cpu_threads=1"
        code = code.replace(TARGET, repr(components.gateway.grpc_address))
        code = code.replace(MODEL, f"LLM({str(tmp_path / 'tiny')!r}{options}")
        (tmp_path / "page.py").write_text(code)
        printed = await run(tmp_path, "page.py")
    assert "tokens of the prompt were in the cache" in printed
    assert "2 answers" in printed
    assert "sampling.top_p" in printed


async def test_examples_run(tmp_path: pathlib.Path) -> None:
    examples = ROOT / "examples"
    assert {path.name for path in examples.glob("*.py")} == {"offline.py", "batch.py", "first_of_two.py"}
    async with components_of(tmp_path) as components:
        target = components.gateway.grpc_address
        offline, batch, race = await asyncio.gather(
            run(tmp_path, str(examples / "offline.py"), str(tmp_path / "tiny")),
            run(tmp_path, str(examples / "batch.py"), target, asked="Once\n" + "x" * 600 + "\nTwice\n"),
            run(tmp_path, str(examples / "first_of_two.py"), target),
        )
        status = await components.client.status()
        assert status.active_requests == 0
    assert offline.count("->") == 3
    cached = [int(count) for count in re.findall(r"\((\d+) of \d+ prompt tokens cached", offline)]
    assert cached[0] == 0 < cached[1]
    first, wrong, third = (json.loads(line) for line in batch.splitlines())
    assert (first["prompt"], third["prompt"]) == ("Once", "Twice")
    assert "600 tokens" in wrong["error"]
    assert len(race.splitlines()) == 1
