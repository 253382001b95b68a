"""Does with the chart's objects what Kubernetes does, as far as the chart relies on it, on one machine.

    pod         init containers one after the other -> sidecars (each until its startup probe passes) -> containers
                -> ready while every readiness probe passes
    its end     no endpoint any more -> preStop of the containers, then SIGTERM, side by side -> sidecars, last to first
                -> SIGKILL for what is there after terminationGracePeriodSeconds
    rollout     one new pod at a time (maxSurge 1, maxUnavailable 0); when it is ready, an old one begins its end
    service     the ready pods that it selects; what reads it hears of a change SPREAD_S later

Fields of probes and hooks that the chart does not use are not known here, and are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.testbed.conditions import WITHIN_S
from tests.support.charts import Manifest, of_kind, pod_of
from tests.support.kube_runtime import PodProcess, PodRuntime

# Delay until clients stop finding a pod that has left its service: kube-proxies and load balancers are updated one by
# one.
SPREAD_S = 2.0
# Delay of restarts after the first, which is immediate.
BACK_OFF_S = 10.0
# Max time until a pod is ready, including model preparation on a busy machine.
READY_TIMEOUT_S = 900.0
PROBE_FIELDS = {"httpGet", "exec", "tcpSocket", "timeoutSeconds", "periodSeconds", "failureThreshold"}
WORKLOADS = ("Deployment", "StatefulSet")


@dataclass(eq=False)
class KubePod:
    """One pod. ``codes``: the exit statuses of its containers at its end; ``restarts``: those before it."""

    name: str
    spec: Manifest
    labels: Mapping[str, str]
    address: str = ""
    running: dict[str, PodProcess] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    order: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)
    restarts: int = 0
    terminating: bool = False

    @property
    def sidecars(self) -> list[Manifest]:
        return [one for one in self.spec.get("initContainers", ()) if one.get("restartPolicy") == "Always"]

    @property
    def whole(self) -> bool:
        """True if every container is ready, sidecars included, and the pod is not terminating."""
        wanted = {one["name"] for one in (*self.sidecars, *self.spec["containers"])}
        return not self.terminating and wanted <= self.ready


class Kubelet:
    """Runs the workloads of rendered manifests on ``runtime``. Use it as an async context manager."""

    def __init__(self, manifests: Sequence[Manifest], runtime: PodRuntime) -> None:
        self.pods: list[KubePod] = []
        self.ended: list[KubePod] = []
        # Awaits clients that have resolved an address before its pod is stopped: on a busy machine they may need longer
        # than the chart's sleep.
        self.arrived: Callable[[str], Awaitable[None]] = _nobody
        self._manifests = manifests
        self._runtime = runtime
        self._numbers = itertools.count(1)
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._endpoints: dict[str, list[tuple[float, tuple[str, ...]]]] = {}

    async def __aenter__(self) -> Kubelet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pod in self.pods:
            for process in tuple(pod.running.values()):
                await process.signal("KILL")
                await process.wait()
            await self._runtime.remove(pod.name)

    async def apply(self) -> None:
        """Start every workload's pods; returns when all are ready."""
        for manifest in self._manifests:
            if manifest["kind"] in WORKLOADS:
                for _ in range(manifest["spec"]["replicas"]):
                    await self._create(manifest)
        for pod in self.pods:
            self._task(self._live(pod))
        await self.until("every pod to be ready", lambda: all(pod.whole for pod in self.pods))

    async def roll_out(self, workload: str) -> None:
        """Replace all pods of a Deployment, as a change of its template does; return when the old ones are gone."""
        manifest = of_kind(self._manifests, "Deployment", workload)
        assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        old = self.of(manifest)
        ends = []
        for pod in old:
            new = await self._create(manifest)
            self._task(self._live(new))
            await self.until(f"{new.name} to be ready", lambda one=new: one.whole)
            ends.append(self._task(self.terminate(pod)))
        await asyncio.gather(*ends)

    async def delete(self) -> None:
        """End all pods, those of workers and gateways before Redis'."""
        later = [pod for pod in self.pods if pod.labels["app.kubernetes.io/component"] == "redis"]
        await asyncio.gather(*(self.terminate(pod) for pod in self.pods if pod not in later))
        await asyncio.gather(*(self.terminate(pod) for pod in later))

    def of(self, workload: Manifest) -> list[KubePod]:
        """Return a workload's pods that are not terminating."""
        selector = workload["spec"]["selector"]["matchLabels"]
        return [pod for pod in self.pods if selector.items() <= pod.labels.items() and not pod.terminating]

    def endpoints(self, service: str) -> tuple[str, ...]:
        """Return the addresses of a service as clients see them, SPREAD_S after a change."""
        known = self._endpoints.get(service, [])
        heard = [addresses for since, addresses in known if since <= time.monotonic() - SPREAD_S]
        return heard[-1] if heard else known[-1][1] if known else ()

    async def until(self, what: str, condition: Callable[[], bool], timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait for a condition of the pods. Raises AssertionError with their state, also if a container has ended."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while not condition():
                    self._raise()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited for {what}: {[(pod.name, sorted(pod.ready)) for pod in self.pods]}") from None

    async def terminate(self, pod: KubePod) -> None:
        """End a pod as its manifest prescribes."""
        pod.terminating = True
        await self._notice()
        until_s = time.monotonic() + pod.spec.get("terminationGracePeriodSeconds", 30)
        await asyncio.gather(*(self._end(pod, one, until_s) for one in pod.spec["containers"]))
        for one in reversed(pod.sidecars):
            await self._end(pod, one, until_s)
        await self._runtime.remove(pod.name)
        self.pods.remove(pod)
        self.ended.append(pod)
        await self._notice()

    async def _create(self, manifest: Manifest) -> KubePod:
        name = f"{manifest['metadata']['name']}-{next(self._numbers)}"
        pod = KubePod(name, pod_of(manifest), manifest["spec"]["template"]["metadata"]["labels"])
        pod.address = await self._runtime.sandbox(name, pod.spec)
        self.pods.append(pod)
        return pod

    async def _live(self, pod: KubePod) -> None:
        for container in pod.spec.get("initContainers", ()):
            if container.get("restartPolicy") == "Always":
                started = asyncio.Event()
                self._task(self._keep(pod, container, started))
                await started.wait()
                continue
            process = await self._start(pod, container)
            code = await process.wait()
            pod.running.pop(container["name"])
            assert code == 0, f"{pod.name}/{container['name']} ended with {code}"
        for container in pod.spec["containers"]:
            self._task(self._keep(pod, container, asyncio.Event()))

    async def _start(self, pod: KubePod, container: Manifest) -> PodProcess:
        process = await self._runtime.start(pod.name, container, self._environment(pod, container))
        pod.running[container["name"]] = process
        pod.order.append(container["name"])
        return process

    async def _keep(self, pod: KubePod, container: Manifest, started: asyncio.Event) -> None:
        """Start a container, and restart it whenever it ends before its pod does."""
        name = container["name"]
        while not pod.terminating:
            process = await self._start(pod, container)
            watch = self._task(self._watch(pod, container, started))
            code = await process.wait()
            watch.cancel()
            pod.running.pop(name)
            pod.ready.discard(name)
            if pod.terminating:
                pod.codes[name] = code
            else:
                await asyncio.sleep(BACK_OFF_S if pod.restarts else 0)
                pod.restarts += 1
            await self._notice()

    async def _watch(self, pod: KubePod, container: Manifest, started: asyncio.Event) -> None:
        """Run a container's probes. One whose startup or liveness probe fails too often is stopped."""
        probes = {kind: container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
        for probe in probes.values():
            assert probe is None or probe.keys() <= PROBE_FIELDS
        if probes["startup"] is not None and not await self._passes(pod, container, probes["startup"]):
            await pod.running[container["name"]].signal("TERM")
            return
        started.set()
        if probes["readiness"] is None:
            pod.ready.add(container["name"])
            await self._notice()
        await asyncio.gather(
            *([self._follow_readiness(pod, container, probes["readiness"])] if probes["readiness"] else []),
            *([self._follow_life(pod, container, probes["liveness"])] if probes["liveness"] else []),
        )

    async def _passes(self, pod: KubePod, container: Manifest, probe: Manifest) -> bool:
        for _ in range(probe["failureThreshold"]):
            if await self._well(pod, container, probe):
                return True
            await asyncio.sleep(probe["periodSeconds"])
        return False

    async def _follow_readiness(self, pod: KubePod, container: Manifest, probe: Manifest) -> None:
        failures = 0
        while True:
            well = await self._well(pod, container, probe)
            failures = 0 if well else failures + 1
            before = container["name"] in pod.ready
            if well:
                pod.ready.add(container["name"])
            elif failures >= probe.get("failureThreshold", 3):
                pod.ready.discard(container["name"])
            if before != (container["name"] in pod.ready):
                await self._notice()
            await asyncio.sleep(probe["periodSeconds"])

    async def _follow_life(self, pod: KubePod, container: Manifest, probe: Manifest) -> None:
        failures = 0
        while failures < probe["failureThreshold"]:
            await asyncio.sleep(probe["periodSeconds"])
            failures = 0 if await self._well(pod, container, probe) else failures + 1
        await pod.running[container["name"]].signal("TERM")

    async def _well(self, pod: KubePod, container: Manifest, probe: Manifest) -> bool:
        try:
            # The chart's seconds suit a serving machine; under test load a probe may need longer.
            async with asyncio.timeout(max(WITHIN_S, probe.get("timeoutSeconds", 1))):
                if "exec" in probe:
                    return await self._runtime.inside(pod.name, container, probe["exec"]["command"]) == 0
                wanted = probe.get("httpGet") or probe["tcpSocket"]
                ports = {one["name"]: one["containerPort"] for one in container["ports"]}
                status = await _asked(pod.address, ports[wanted["port"]], wanted.get("path"))
                return 200 <= status < 400
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            return False

    async def _end(self, pod: KubePod, container: Manifest, until_s: float) -> None:
        hook = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        assert hook.keys() == {"sleep"}
        await asyncio.sleep(min(hook["sleep"]["seconds"], until_s - time.monotonic()))
        await self.arrived(pod.address)
        process = pod.running.get(container["name"])
        if process is None:
            return
        await process.signal("TERM")
        try:
            await self.until("", lambda: container["name"] in pod.codes, max(until_s - time.monotonic(), 0))
        except AssertionError:
            pod.killed.add(container["name"])
            await process.signal("KILL")
            await self.until(f"{container['name']} to die", lambda: container["name"] in pod.codes)

    def _environment(self, pod: KubePod, container: Manifest) -> dict[str, str]:
        """Return a container's text with references to the pod's name and earlier variables resolved, and service names
        replaced by their addresses."""
        told: dict[str, str] = {}
        for one in container.get("env", ()):
            if "valueFrom" in one:
                assert one["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
                told[one["name"]] = pod.name
            else:
                value = re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], one.get("value", ""))
                told[one["name"]] = re.sub(r"(?<=//)[\w-]+(?=:\d)", lambda found: self._resolved(found[0]), value)
        return told

    def _resolved(self, name: str) -> str:
        for pod in self._selected(name):
            return pod.address
        return name

    def _selected(self, service: str) -> list[KubePod]:
        found = [one for one in self._manifests if one["kind"] == "Service" and one["metadata"]["name"] == service]
        return [pod for one in found for pod in self.pods if one["spec"]["selector"].items() <= pod.labels.items()]

    async def _notice(self) -> None:
        """Notify waiters of a change, and record each service's endpoints."""
        for one in self._manifests:
            if one["kind"] == "Service":
                name = one["metadata"]["name"]
                addresses = tuple(pod.address for pod in self._selected(name) if pod.whole)
                known = self._endpoints.setdefault(name, [])
                if not known or known[-1][1] != addresses:
                    known.append((time.monotonic(), addresses))
        async with self._changed:
            self._changed.notify_all()

    def _task(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task

    def _raise(self) -> None:
        """Raise the error that ended a task."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise AssertionError("a pod failed") from task.exception()


async def _nobody(address: str) -> None:
    """Return at once."""


async def _asked(address: str, port: int, path: Any) -> int:
    """Return the status of a page, or without a path 200 for a port that accepts a connection."""
    reader, writer = await asyncio.open_connection(address, port)
    try:
        if path is None:
            return 200
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        return int((await reader.readuntil(b"\n")).split()[1])
    finally:
        with contextlib.suppress(OSError):
            writer.transport.abort()
