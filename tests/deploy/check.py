"""`make compose-check`: docker-compose.yml by its schema, as processes of this machine, then on an engine of Docker.

    python -m tests.deploy.check [--model demo] [--prefill 2] [--decode 2] [--engine auto|own|none]

Where docker compose is installed, it checks the files too, which needs no engine. ``auto`` takes the engine that runs,
else starts one where root can; where neither is possible, a line says why.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request

from lab.testbed.conditions import WITHIN_S, until
from pillion import AsyncClient
from pillion.types import ClusterStatus
from tests.deploy.on_engine import serve_on_engine
from tests.support.compose import COMPOSE_FILE, ROOT, needed_for, read_image, read_services
from tests.support.compose_run import ComposeRun
from tests.support.docker_engine import NoDockerError, own_engine, some_engine
from tests.support.docker_project import compose_command

TLS_FILE = ROOT / "deploy" / "compose.tls.yml"
UP_TIMEOUT_S = 300.0
SEEN_TIMEOUT_S = 120.0
REQUESTS = 8


def check_schema() -> None:
    """Check the file by the compose specification's schema of check-jsonschema. Raises CalledProcessError."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*command, str(COMPOSE_FILE), str(TLS_FILE)], check=True)


def check_with_docker() -> str:
    """Let docker compose check the files where it is installed; return a line about the result."""
    try:
        compose = compose_command()
    except NoDockerError as missing:
        return f"{missing}: its own reading of the files was not asked for"
    for files in (["-f", COMPOSE_FILE], ["-f", COMPOSE_FILE, "-f", TLS_FILE]):
        subprocess.run([*compose, "--profile", "gpu", *map(str, files), "config", "--quiet"], check=True)
    return f"{' '.join(compose)} config: fine"


async def serve_and_ask(
    run: ComposeRun, prompts: list[str], max_tokens: int = 16
) -> tuple[ClusterStatus, list[str], bytes]:
    """Return a running project's status, its greedy answers to ``prompts``, sent at once, and HTTP's /v1/models."""
    gateway = run.of("gateway")[0]
    components = sum(len(run.of(name)) for name in ("kvnode", "prefill", "decode", "gateway"))
    async with AsyncClient(f"{gateway.address}:50051") as client:

        async def complete() -> ClusterStatus | None:
            status = await client.status()
            return status if len(status.components) >= components else None

        status = await until(f"the gateway to see {components} components", complete, SEEN_TIMEOUT_S)

        async def answer(prompt: str) -> str:
            deltas = client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
            return "".join([delta.text async for delta in deltas])

        answers = await asyncio.gather(*(answer(prompt) for prompt in prompts))
    models = await asyncio.to_thread(_get, f"http://{gateway.address}:8000/v1/models")
    return status, answers, models


def metrics_pages(run: ComposeRun) -> dict[str, str]:
    """Return the Prometheus page of each running container. Raises URLError where one has none."""
    components = [
        one for one in run.containers if "PILLION_METRICS_PORT" in one.service.environment and one.exit_code is None
    ]
    return {one.name: _get(f"http://{one.address}:9464/metrics").decode() for one in components}


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=WITHIN_S) as reply:
        return bytes(reply.read())


async def _run(model: str, scale: dict[str, int], folder: pathlib.Path) -> None:
    environ = {**os.environ, "MODEL": model, "OTEL_SDK_DISABLED": "true"}
    services = needed_for(read_services(environ), ["gateway"])
    async with ComposeRun(services, read_image(), folder, scale) as run:
        began_s = time.monotonic()
        await run.up(UP_TIMEOUT_S)
        print(f"up after {time.monotonic() - began_s:.1f} s, in this order: {', '.join(run.started)}")
        prompts = [f"Here is the story of number {number}: " + "it grew and grew. " * 20 for number in range(REQUESTS)]
        status, answers, models = await serve_and_ask(run, prompts)
        for component in sorted(status.components, key=lambda component: (component.role, component.component_id)):
            print(f"  {component.role:8} {component.component_id}")
        assert all(answers), "an answer is empty"
        print(f"{len(answers)} answers, the first: {answers[0]!r}; /v1/models: {len(models)} bytes")
        pages = await asyncio.to_thread(metrics_pages, run)
        print(f"metrics pages, in lines: { ({name: page.count(chr(10)) for name, page in pages.items()}) }")
        codes = await run.down()
        print(f"down: {codes}")
        # The keeper has nothing to finish, and ends by the signal.
        wrong = {name: code for name, code in codes.items() if code and not name.startswith(("redis", "keeper"))}
        assert wrong == {}, codes


def run_on_engine(which: str) -> None:
    """Serve on the engine that runs or, where there is none or ``which`` is "own", on one that is started for this."""
    try:
        with some_engine() if which == "auto" else own_engine() as engine:
            serve_on_engine(engine, functools.partial(print, flush=True))
    except NoDockerError as missing:
        print(f"not run on an engine of Docker: {missing}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="what MODEL is in the compose file")
    parser.add_argument("--prefill", type=int, default=2, help="as docker compose up --scale prefill=N")
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--engine", choices=("auto", "own", "none"), default="auto", help="which engine of Docker")
    args = parser.parse_args()
    check_schema()
    print(check_with_docker())
    left_out = sorted(read_services({}).keys() - needed_for(read_services({}), ["gateway"]).keys())
    print(f"not run, for they need images of others or devices: {', '.join(left_out)}")
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        asyncio.run(_run(args.model, {"prefill": args.prefill, "decode": args.decode}, pathlib.Path(folder)))
    if args.engine != "none":
        run_on_engine(args.engine)


if __name__ == "__main__":
    main()
