"""The gateway as a component: both ports, the links, and its own heartbeat.

keys and certificates read -> models prepared -> tokenizers loaded -> links up -> gRPC port -> HTTP port -> heartbeats
while it runs: keys and certificates are read again when their files change; --probe-listen says whether it is ready
stop(grace_s):  out of the registry, health NOT_SERVING
             -> both ports take no connections; those that are open end behind their requests under way (GOAWAY, close)
             -> streams under way end by themselves, or grace_s is over -> what is left is cut -> tokenizers, links
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from pillion.config import AnswerFlags, GatewayFlags, ServedModelFlags, refuse_contradictions, refuse_strangers
from pillion.engine.checkpoints.generation_config import default_sampling
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.errors import ConfigError, PillionError
from pillion.gateway.adapters.adapter_names import AdapterNames, AdapterOptions, parse_lora_modules
from pillion.gateway.adapters.name_table import FORGET_MS, MAX_CHANGES
from pillion.gateway.admission.api_keys import KeyFile
from pillion.gateway.admission.shared_quotas import SharedQuotas
from pillion.gateway.batches.batch_folder import BatchFolder
from pillion.gateway.batches.batch_runner import BatchRunner
from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grpc_api.gateway_servicer import GatewayServicer, KeyCheck, RawGenerate
from pillion.gateway.http_api.batch_calls import LineCalls
from pillion.gateway.http_api.http_server import HttpServer, start_http
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.links.defects import Defects
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.request.job import GatewayOptions
from pillion.gateway.request.validation import ModelLimits
from pillion.gateway.scaling.forecaster import WorkerForecaster
from pillion.gateway.scaling.objectives import parse_objectives
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.index.shared_buckets import SharedBuckets
from pillion.kvstore.index.shared_loads import SharedLoads
from pillion.kvstore.index.shared_names import SharedNames
from pillion.net import rpc, tls
from pillion.net.addresses import is_local
from pillion.net.watched import WATCH_INTERVAL_S
from pillion.served_models import other_models
from pillion.v1 import gateway_pb2_grpc
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

SERVICE = "pillion.v1.Gateway"
# Open calls of the public gRPC service, those that watch the health included.
MAX_GRPC_CALLS = 8192
DRAIN_POLL_S = 0.02
READY_POLL_S = 0.1
PREFILL = "prefill"
# Time for the last messages of streams that have ended; calls that watch the health are cut then.
LAST_MESSAGES_S = 0.5
DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Ports:
    """What a gateway listens on: both public ports, and the address of --probe-listen."""

    grpc: rpc.RunningServer
    http: HttpServer
    probe: rpc.RunningServer | None = None


# Listens for a gateway. Raises OSError for an address that cannot be bound.
Listen = Callable[[Gateway, GatewayServicer, BatchRunner | None], Awaitable[Ports]]


class GatewayServer:
    """A running gateway. ``address`` and ``grpc_address`` are the same; ``http_address`` is the other port."""

    def __init__(
        self,
        record: ComponentRecord,
        gateway: Gateway,
        registry: Registry,
        servicer: GatewayServicer,
        ports: Ports,
        heartbeat_s: float,
        keys: KeyFile | None = None,
        batches: BatchRunner | None = None,
    ) -> None:
        self.component_id = record.component_id
        self.address = self.grpc_address = ports.grpc.address
        self.http_address = ports.http.address
        self.gateway = gateway
        self.meters = gateway.meters
        self.not_ready = gateway.not_ready
        self._record = record
        self.cluster = gateway.cluster
        self._registry = registry
        self._servicer = servicer
        self._server, self.http, self._probe = ports.grpc, ports.http, ports.probe
        self._batches = batches
        if batches is not None:
            batches.start()
        self._tasks = [asyncio.create_task(self._beat(heartbeat_s), name="heartbeat")]
        if gateway.adapters is not None:
            self._tasks.append(asyncio.create_task(gateway.adapters.run(heartbeat_s), name="adapters"))
        if gateway.adapter_spread is not None:
            self._tasks.append(asyncio.create_task(gateway.adapter_spread.run(heartbeat_s), name="files of adapters"))
        if keys is not None:
            self._tasks.append(asyncio.create_task(_follow(keys, gateway), name="API keys"))
        if ports.probe is not None:
            self._tasks.append(asyncio.create_task(_tell_ready(ports.probe, gateway), name="readiness"))

    async def stop(self, grace_s: float = 2.0) -> None:
        """Drains: streams may finish for ``grace_s`` seconds; then everything they held is freed."""
        for task in self._tasks:
            task.cancel()
        if self.gateway.adapters is not None:
            # What receives an adapter's files may wait for the process that reads them.
            await self.gateway.adapters.end_reading()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._registry.leave(self.component_id)
        except PillionError as error:
            log.debug("could not leave the registry: %s", error.message)
        self.gateway.drain()
        await asyncio.gather(*(server.not_serving() for server in (self._server, self._probe) if server is not None))
        # A client's next request then goes over a new connection, which another process behind this port or another
        # replica takes. Refused over the old one, it would come again over the old one.
        self._server.close()
        closing = asyncio.create_task(self.http.stop(grace_s))
        if self._batches is not None:
            # At once: their lines run again elsewhere, and nobody waits for them.
            await self._batches.stop()
        await self._drained(grace_s)
        await self._server.stop(min(grace_s, LAST_MESSAGES_S))
        await closing
        if self._probe is not None:
            # Until here it showed that this process drains and does not hang.
            await self._probe.stop(0)
        if self._batches is not None:
            self._batches.close()
        await self.gateway.aclose()
        await self.cluster.aclose()

    async def wait_failed(self) -> str:
        """Why the gateway cannot go on by itself. It only returns when its HTTP port has died."""
        await asyncio.wait({self.http.task})
        return "the HTTP server ended"

    async def _drained(self, grace_s: float) -> None:
        """Returns when no stream is under way, or after ``grace_s`` seconds."""
        until_s = time.monotonic() + grace_s
        while (self._servicer.streams or self.gateway.active_requests) and time.monotonic() < until_s:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)

    async def _beat(self, heartbeat_s: float) -> None:
        defects = Defects("the gateway's heartbeat")
        while True:
            totals = self.gateway.totals
            now = msgspec.structs.replace(
                self._record,
                running_requests=self.gateway.active_requests,
                prompt_tokens=totals.prompt_tokens,
                cached_tokens=totals.cached_tokens,
                completion_tokens=totals.completion_tokens,
                arrivals=self.cluster.forecaster.arrivals(),
            )
            taken = not self._registry.refusal
            try:
                await self._registry.heartbeat(now)
                if not taken:
                    log.warning("the registry takes heartbeats again")
            except PillionError as error:
                if taken:
                    log.warning(
                        "the registry takes no heartbeats; this gateway goes on with the components that it is"
                        " connected to and finds no new ones: %s",
                        error.message,
                    )
            except Exception as error:  # noqa: BLE001  (a gateway without heartbeats is taken for dead)
                defects.note(error)
            await asyncio.sleep(heartbeat_s)


async def start_gateway(flags: GatewayFlags, *, prepared: PreparedModel | None = None) -> GatewayServer:
    """Starts a gateway. With ``prepared``, --model is not prepared again.

    Raises:
        ConfigError: flags or models that cannot work, or a port that is taken.
    """
    _check(flags)
    keys = await asyncio.to_thread(KeyFile, flags.api_keys) if flags.api_keys else None
    identity = tls.identity_of(flags.tls_cert, flags.tls_key, flags.tls_ca)
    if flags.api_keys and not flags.tls_cert and not is_local(f"{flags.host}:0"):
        log.warning("API keys travel in plain text to %s: give --tls-cert, or end TLS before this port", flags.host)
    entries = await asyncio.to_thread(_entries, flags, prepared)

    async def listen(gateway: Gateway, servicer: GatewayServicer, batches: BatchRunner | None) -> Ports:
        return await _listen(flags, gateway, servicer, identity, batches)

    return await serve_models(flags, entries, listen, keys)


def _check(flags: GatewayFlags) -> None:
    """Raises ConfigError for flags that cannot work, whatever the models are."""
    parse_policy(flags.split_policy)
    parse_objectives(flags.slo, flags.attainment, flags.worker_start_s)
    if flags.chunk_size < flags.block_size or flags.chunk_size % flags.block_size:
        raise ConfigError(f"--chunk-size {flags.chunk_size} is no multiple of --block-size {flags.block_size}")
    if not flags.redis_url:
        raise ConfigError("the gateway needs --redis-url")
    refuse_strangers(flags)


async def serve_models(
    flags: GatewayFlags, entries: Mapping[str, ModelEntry], listen: Listen, keys: KeyFile | None = None
) -> GatewayServer:
    """Connects a gateway of these models, by served name, to its cluster; then it listens, and its heartbeats begin.
    Without ``keys`` it serves everybody. Raises ConfigError as :func:`start_gateway`."""
    adapters = await asyncio.to_thread(_adapters, flags, entries)
    component_id = flags.component_id or f"gateway-{os.getpid()}-{secrets.token_hex(3)}"
    registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms)
    grace_s, loads = flags.heartbeat_timeout_ms / 1000, SharedLoads(flags.redis_url)
    forecaster = WorkerForecaster(parse_objectives(flags.slo, flags.attainment, flags.worker_start_s))
    cluster = Cluster(component_id, registry, Index(flags.redis_url), grace_s, loads, forecaster)
    # Without tenants there is nothing to count.
    quotas = SharedQuotas(None if keys is None else SharedBuckets(flags.redis_url))
    ring = None if keys is None else keys.ring
    gateway = Gateway(entries, cluster, _options(flags, entries), ring, quotas, adapters)
    batches = _batches(flags, gateway)
    await asyncio.gather(cluster.start(), *(entry.template.warm_up() for entry in entries.values()))
    servicer = GatewayServicer(gateway)
    try:
        ports = await listen(gateway, servicer, batches)
    except OSError as error:
        await gateway.aclose()
        await cluster.aclose()
        raise ConfigError(f"the gateway cannot listen: {error}") from None
    record = ComponentRecord(
        component_id=component_id, role="gateway", address=ports.grpc.address, model=", ".join(entries)
    )
    return GatewayServer(record, gateway, registry, servicer, ports, flags.heartbeat_ms / 1000, keys, batches)


def _options(flags: GatewayFlags, entries: Mapping[str, ModelEntry]) -> GatewayOptions:
    longest = max(entry.limits.max_model_len_tokens for entry in entries.values())
    return GatewayOptions(
        policy=parse_policy(flags.split_policy),
        # No span is longer than the longest prompt: that is one chunk.
        chunk_tokens=flags.chunk_size if flags.enable_chunked_prefill else max(longest, flags.block_size),
        max_attempts=flags.max_attempts,
        max_inflight_requests=flags.max_inflight_requests,
        max_inflight_tokens=flags.max_inflight_tokens,
        prefix_caching=flags.enable_prefix_caching,
        max_running_requests=flags.max_running_requests,
    )


def _batches(flags: GatewayFlags, gateway: Gateway) -> BatchRunner | None:
    """What runs the batches of --batch-path. Raises ConfigError."""
    if not flags.batch_path:
        return None
    folder = BatchFolder(
        flags.batch_path,
        max_bytes=flags.batch_bytes,
        file_bytes=flags.batch_file_bytes,
        keep_s=flags.batch_keep_days * DAY_S,
        tenant_percent=flags.batch_tenant_percent,
    )
    lines = LineCalls(ModelCalls(gateway))
    return BatchRunner(folder, lines.serve, gateway.tenant_named, gateway.meters, flags.max_batch_requests)


def _adapters(flags: GatewayFlags, entries: Mapping[str, ModelEntry]) -> AdapterNames | None:
    """The names of adapters, those of --lora-modules loaded. Reads files; raises ConfigError."""
    refuse_contradictions(flags)
    if not flags.enable_lora:
        return None
    names = AdapterNames(
        {name: entry.folder for name, entry in entries.items() if entry.folder is not None},
        {entry.alias: name for name, entry in entries.items() if entry.alias and entry.alias not in entries},
        AdapterOptions(
            max_rank=flags.max_lora_rank,
            max_loras=flags.max_loras,
            folders=flags.lora_path,
            updating=flags.allow_runtime_lora_updating,
            limits=flags.store_limits,
        ),
        SharedNames(flags.redis_url, MAX_CHANGES, FORGET_MS) if flags.allow_runtime_lora_updating else None,
    )
    names.load_fixed(parse_lora_modules(flags.lora_modules))
    return names


def _entries(flags: GatewayFlags, prepared: PreparedModel | None) -> dict[str, ModelEntry]:
    """All models that the flags name, by served name. Reads files; raises ConfigError."""
    served: list[ServedModelFlags] = [flags, *other_models(flags)]
    models = [prepared if prepared is not None else prepare(flags), *map(prepare, served[1:])]
    entries = {model.name: model_entry(model, chosen) for model, chosen in zip(models, served, strict=True)}
    if len(entries) < len(models):
        raise ConfigError(f"--also-model: two models are called alike; there are {', '.join(entries)}")
    return entries


async def _listen(
    flags: GatewayFlags,
    gateway: Gateway,
    servicer: GatewayServicer,
    identity: tls.Identity | None,
    batches: BatchRunner | None,
) -> Ports:
    """Raises OSError for an address that cannot be bound; nothing half-started stays."""
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    server = await rpc.start_server(
        f"{host}:{flags.grpc_port}",
        [(SERVICE, lambda s: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, s))],
        credentials=None if identity is None else tls.server_credentials(identity),
        interceptors=[KeyCheck(gateway.tenant_of), RawGenerate()],
        max_calls=MAX_GRPC_CALLS,
        max_message_bytes=flags.max_message_bytes,
        share_port=flags.share_ports,
    )
    async with contextlib.AsyncExitStack() as started:
        started.push_async_callback(server.stop, 0)
        http = await start_http(gateway, flags, identity, batches)
        started.push_async_callback(http.stop, 0)
        probe: rpc.RunningServer | None = None
        if flags.probe_listen:
            credentials = rpc.internal_credentials(flags.probe_listen)
            probe = await rpc.start_server(flags.probe_listen, [], credentials=credentials, serving=False)
        started.pop_all()
    return Ports(server, http, probe)


async def _tell_ready(probe: rpc.RunningServer, gateway: Gateway) -> None:
    """Keeps the health at the probes' address: whether a request would be served now, and under the name "prefill"
    whether a prefill worker could be given its prompt."""
    while True:
        await probe.set_serving(not gateway.not_ready())
        await probe.set_serving(gateway.cluster.knows(PREFILL), (PREFILL,))
        await asyncio.sleep(READY_POLL_S)


async def _follow(keys: KeyFile, gateway: Gateway) -> None:
    """Takes new keys soon after their file changed."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        try:
            if await asyncio.to_thread(keys.refresh):
                gateway.take_keys(keys.ring)
        except Exception:
            # A defect must not be the end of all changes: a key that was taken away would stay good.
            log.exception("the keys could not be read again")


def model_entry(model: PreparedModel, flags: AnswerFlags) -> ModelEntry:
    """What a gateway needs of a model. Reads files; raises ConfigError."""
    tokenizer = ModelTokenizer.load(model.folder, flags.chat_template)
    formats = choose_formats(
        tokenizer.chat_template,
        tokenizer.codec,
        flags.tool_call_parser,
        flags.reasoning_parser,
        flags.enable_auto_tool_choice,
    )
    log.info(
        "model %s: tool-call parser %s, reasoning parser %s", model.name, formats.tool_parser, formats.reasoning_parser
    )
    return ModelEntry(
        limits=ModelLimits(model.name, model.max_model_len, model.vocab_size, model.original_tokens),
        alias=model.alias,
        fingerprint=model.fingerprint,
        eos_token_ids=model.eos_token_ids,
        tokenizer=tokenizer,
        template=ChatTemplate(tokenizer.chat_template, tokenizer.specials, spells_out=formats.spells_out),
        grammars=GrammarChecker(model.folder / "tokenizer.json", model.vocab_size, model.eos_token_ids),
        formats=formats,
        weights=model.weights,
        folder=model.folder,
        sampling=default_sampling(model, flags),
    )
