"""What the chart promises of starts, upgrades and ends, replayed under load by what does as the kubelet does.

    python -m tests.deploy.rollout [--containers] [--model NAME]

The pods' containers are processes of this machine or, with --containers, containers of Docker's engine: the one that
runs, else one that root starts for this. The worker pod and the gateway pod are replaced while clients ask through the
gateways' service.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from lab.testbed.cluster import PATIENT_MS
from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from tests.support.charts import render
from tests.support.docker_engine import DockerEngine, own_engine, running_engine
from tests.support.kube_runtime import DockerRuntime, PodRuntime, ProcessRuntime
from tests.support.kubelet import Kubelet
from tests.support.watched_streams import Addresses, SteadyLoad

CLIENTS, TOKENS = 4, 120
PROMPTS = [f"Here is the story of number {number}: " + "it grew and grew. " * 8 for number in range(CLIENTS)]
# Exit code of a container that ends by SIGTERM itself.
TERMINATED = 128 + 15


def values_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chart's values: one worker pod with both roles, one gateway, the chart's own drains and grace."""
    return {
        "model": dict(model),
        # A busy machine must not cause lost heartbeats.
        "env": {"PILLION_CPU_THREADS": "1", "PILLION_HEARTBEAT_TIMEOUT_MS": str(PATIENT_MS)},
        "pools": {"prefill": None, "decode": None, "both": {"prefill": 1, "decode": 1, "kvPoolBytes": "64MiB"}},
        "gateway": {"replicas": 1, "splitPolicy": "disaggregated", "autoscaling": {"enabled": False}},
    }


def tiny_model(folder: pathlib.Path) -> dict[str, Any]:
    """Make a tiny model under ``folder``, which everybody may read then, and return what the chart is told of it."""
    path = save_model(folder / "models" / "tiny")
    for place in (folder, path.parent, path, *path.iterdir()):
        place.chmod(0o755)
    volume = {"hostPath": {"path": str(path.parent), "type": "Directory"}}
    return {"name": "/models/tiny", "servedName": "tiny", "cpuKernels": "torch", "volume": volume}


async def replay(runtime: PodRuntime, values: Mapping[str, Any], name: str, say: Callable[[str], None]) -> None:
    """Start the chart's pods, replace those of workers and of the gateway under load, and end all. Raises
    AssertionError where a stream is lost, a token differs, or a pod does not end as it should. ``name`` is the served
    model's."""
    manifests = render(values)
    async with Kubelet(manifests, runtime) as kubelet:
        began_s = time.monotonic()
        await kubelet.apply()
        say(f"all pods ready after {time.monotonic() - began_s:.1f} s")

        def addresses() -> Addresses:
            address = kubelet.endpoints("rel-gateway")[0]
            return Addresses(f"{address}:50051", f"{address}:8000", name)

        await until("the gateway behind its service", lambda: kubelet.endpoints("rel-gateway"))
        load = SteadyLoad(addresses, TOKENS, await asyncio.to_thread(_texts, addresses()))
        kubelet.arrived = load.arrived
        async with _under(load):
            for workload in ("rel-both", "rel-gateway"):
                began_s, before = time.monotonic(), len(load.answers)
                await kubelet.roll_out(workload)
                took_s, answers = time.monotonic() - began_s, len(load.answers) - before
                say(f"{workload} replaced after {took_s:.1f} s, {answers} answers meanwhile")
                await until("answers after it", functools.partial(load.has, len(load.answers) + 2 * CLIENTS))
        became = f"{len(load.lost)} lost, {load.differing} differing, longest pause {load.pause_s:.2f} s"
        say(f"{len(load.answers)} answers: {became}")
        assert load.lost == [], load.lost[:3]
        assert load.differing == 0
        await kubelet.delete()
        _check_pods(kubelet, say)


def _texts(addresses: Addresses) -> dict[str, str]:
    with addresses.streams(PROMPTS, TOKENS) as streams:
        pass
    return {stream.prompt: stream.text for stream in streams}


@contextlib.asynccontextmanager
async def _under(load: SteadyLoad) -> AsyncIterator[None]:
    running = load.running()
    running.__enter__()
    try:
        yield
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def _check_pods(kubelet: Kubelet, say: Callable[[str], None]) -> None:
    """Every pod started and ended in order, nothing was killed, and nothing had to be started again."""
    for pod in kubelet.ended:
        say(f"{pod.name}: started {', '.join(pod.order)}; ended {pod.codes}")
        assert (pod.killed, pod.restarts) == (set(), 0), pod.name
        ends = list(pod.codes)
        if pod.name.startswith("rel-both"):
            assert pod.order[:3] == ["prepare", "keeper", "kvnode"]
            assert ends[-2:] == ["kvnode", "keeper"]
            assert pod.codes.pop("keeper") == TERMINATED
        assert not any(pod.codes.values()), pod.name


@contextlib.contextmanager
def _engine() -> Any:
    engine = running_engine()
    with contextlib.nullcontext(engine) if engine is not None else own_engine() as found:
        yield found


async def _main(containers: bool, model: str) -> None:
    say = functools.partial(print, flush=True)
    with tempfile.TemporaryDirectory(prefix="pil-") as folder, contextlib.ExitStack() as stack:
        values = values_of({"name": model} if model else await asyncio.to_thread(tiny_model, pathlib.Path(folder)))
        model = model or "tiny"
        if not containers:
            await replay(ProcessRuntime(pathlib.Path(folder)), values, model, say)
            return
        engine: DockerEngine = stack.enter_context(_engine())
        images = {"pillion": await asyncio.to_thread(engine.build), "redis": engine.debian_image()}
        async with DockerRuntime(engine, images) as runtime:
            await replay(runtime, values, model, say)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--containers", action="store_true", help="containers of Docker's engine, not processes")
    parser.add_argument(
        "--model", default="", help="the chart's model.name, such as demo; without it a tiny model is made"
    )
    args = parser.parse_args()
    asyncio.run(_main(args.containers, args.model))


if __name__ == "__main__":
    main()
