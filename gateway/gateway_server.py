"""Runs the gateway as a component: both ports, the links, and its own heartbeat.

keys and certificates read -> models prepared -> tokenizers loaded -> links up -> gRPC port -> HTTP port -> heartbeats
while it runs: keys and certificates are read again when their files change; --probe-listen says whether it is ready
stop(grace_s):  out of the registry, health NOT_SERVING
             -> both ports take no connections; those that are open end after their requests under way (GOAWAY, close)
             -> streams under way end by themselves, or grace_s is over -> what is left is cut -> tokenizers, links
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pillion._version import VERSION
from pillion.config import AnswerFlags, GatewayFlags, ServedModelFlags, refuse_contradictions, refuse_strangers
from pillion.engine.checkpoints.generation_config import default_sampling
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.errors import ConfigError, PillionError
from pillion.gateway.admission.api_keys import KeyFile
from pillion.gateway.admission.shared_quotas import SharedQuotas
from pillion.gateway.answer_formats import FormatSource, formats_of
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.gateway_part import PARTS, GatewayPart
from pillion.gateway.grpc_api.gateway_servicer import GatewayServicer, KeyCheck, RawGenerate
from pillion.gateway.http_api.http_server import HttpServer, start_http
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.links.defects import Defects
from pillion.gateway.named_adapters import ServedFolders, adapters_of
from pillion.gateway.planning.cluster_view import parse_policy
from pillion.gateway.planning.forecast import forecaster_of
from pillion.gateway.request.admitted_request import GatewayOptions
from pillion.gateway.request.validation import ModelLimits
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.index.shared_buckets import SharedBuckets
from pillion.kvstore.index.shared_loads import SharedLoads
from pillion.net import rpc, tls
from pillion.net.addresses import is_local
from pillion.net.watched import WATCH_INTERVAL_S
from pillion.rooms import entered
from pillion.served_models import other_models
from pillion.v1 import gateway_pb2_grpc
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

SERVICE = "pillion.v1.Gateway"
# The public gRPC service may have this many open calls, those that watch the health included.
MAX_GRPC_CALLS = 8192
DRAIN_POLL_S = 0.02
READY_POLL_S = 0.1
PREFILL = "prefill"
# The last messages of streams that have ended may take this long to be sent; then calls that watch the health are cut.
LAST_MESSAGES_S = 0.5
# A gateway makes its first grammars this long after it has started, so that the start is not delayed.
WARM_UP_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Ports:
    """Holds what a gateway listens on: both public ports, and the address of --probe-listen."""

    grpc: rpc.RunningServer
    http: HttpServer
    probe: rpc.RunningServer | None = None


# Such a function listens for a gateway and its parts. It raises OSError for an address that cannot be bound.
Listen = Callable[[Gateway, GatewayServicer, Sequence[GatewayPart]], Awaitable[Ports]]


class GatewayServer:
    """Represents a running gateway. ``address`` and ``grpc_address`` are both the gRPC port's; ``http_address`` is the
    other port's."""

    def __init__(
        self,
        record: ComponentRecord,
        gateway: Gateway,
        registry: Registry,
        servicer: GatewayServicer,
        ports: Ports,
        heartbeat_s: float,
        keys: KeyFile | None = None,
        parts: Sequence[GatewayPart] = (),
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
        self._parts = parts
        for part in parts:
            part.start(heartbeat_s)
        self._tasks = [
            asyncio.create_task(self._beat(heartbeat_s), name="heartbeat"),
            asyncio.create_task(_warm_up(gateway), name="first grammars"),
        ]
        if keys is not None:
            self._tasks.append(asyncio.create_task(_follow(keys, gateway), name="API keys"))
        if ports.probe is not None:
            self._tasks.append(asyncio.create_task(_tell_ready(ports.probe, gateway), name="readiness"))

    async def stop(self, grace_s: float = 2.0) -> None:
        """Drains the gateway: streams may finish for ``grace_s`` seconds; then everything they held is freed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._registry.leave(self.component_id)
        except PillionError as error:
            log.debug("could not leave the registry: %s", error.message)
        self.gateway.drain()
        await asyncio.gather(*(server.not_serving() for server in (self._server, self._probe) if server is not None))
        # A client's next request then goes over a new connection, which another process on this port or another replica
        # takes. A request that is refused over the old connection would be sent again over the same one.
        self._server.close()
        closing = asyncio.create_task(self.http.stop(grace_s))
        for part in self._parts:
            await part.stop()
        await self._drained(grace_s)
        await self._server.stop(min(grace_s, LAST_MESSAGES_S))
        await closing
        if self._probe is not None:
            # Until this point the probe's port showed that the process drains and does not hang.
            await self._probe.stop(0)
        for part in self._parts:
            await part.aclose()
        await self.gateway.aclose()
        await self.cluster.aclose()

    async def wait_failed(self) -> str:
        """Returns why the gateway cannot go on by itself, which happens only when its HTTP port has died."""
        await asyncio.wait({self.http.task})
        return "the HTTP server ended"

    async def _drained(self, grace_s: float) -> None:
        """Returns when no stream runs any more, or after ``grace_s`` seconds."""
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
    has_keys = bool(flags.api_keys or flags.api_key)
    keys = await asyncio.to_thread(KeyFile, flags.api_keys, flags.api_key) if has_keys else None
    identity = tls.identity_of(flags.tls_cert, flags.tls_key, flags.tls_ca)
    if has_keys and not flags.tls_cert and not is_local(f"{flags.host}:0"):
        log.warning("API keys travel in plain text to %s: give --tls-cert, or end TLS before this port", flags.host)
    entries = await asyncio.to_thread(_entries, flags, prepared)

    async def listen(gateway: Gateway, servicer: GatewayServicer, parts: Sequence[GatewayPart]) -> Ports:
        return await _listen(flags, gateway, servicer, identity, parts)

    return await serve_models(flags, entries, listen, keys)


def _check(flags: GatewayFlags) -> None:
    """Raises ConfigError for flags that no gateway can work with, whatever its models are."""
    refuse_contradictions(flags)
    parse_policy(flags.split_policy)
    forecaster_of(flags)
    if flags.chunk_size < flags.block_size or flags.chunk_size % flags.block_size:
        raise ConfigError(f"--chunk-size {flags.chunk_size} is no multiple of --block-size {flags.block_size}")
    if not flags.redis_url:
        raise ConfigError("the gateway needs --redis-url")
    refuse_strangers(flags)


async def serve_models(
    flags: GatewayFlags, entries: Mapping[str, ModelEntry], listen: Listen, keys: KeyFile | None = None
) -> GatewayServer:
    """Connects a gateway of these models, by served name, to its cluster; then the gateway listens and begins its
    heartbeats. Without ``keys`` it serves everybody. Raises ConfigError as :func:`start_gateway` does."""
    adapters = await asyncio.to_thread(adapters_of, flags, _folders(entries))
    component_id = flags.component_id or f"gateway-{os.getpid()}-{secrets.token_hex(3)}"
    registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms)
    grace_s, loads = flags.heartbeat_timeout_ms / 1000, SharedLoads(flags.redis_url)
    cluster = Cluster(component_id, registry, Index(flags.redis_url), grace_s, loads, forecaster_of(flags))
    # Without API keys there are no tenants whose quotas could be counted.
    quotas = SharedQuotas(None if keys is None else SharedBuckets(flags.redis_url))
    ring = None if keys is None else keys.ring
    gateway = Gateway(entries, cluster, _options(flags, entries), ring, quotas, adapters)
    parts = [make(gateway, flags) for make in entered(PARTS)]
    await asyncio.gather(cluster.start(), *(entry.template.warm_up() for entry in entries.values()))
    # The calls of the service that this class lacks are served by rooms.
    servicer = GatewayServicer(gateway)  # type: ignore[abstract]
    try:
        ports = await listen(gateway, servicer, parts)
    except OSError as error:
        for part in parts:
            await part.aclose()
        await gateway.aclose()
        await cluster.aclose()
        raise ConfigError(f"the gateway cannot listen: {error}") from None
    record = ComponentRecord(
        component_id=component_id,
        role="gateway",
        address=ports.grpc.address,
        version=VERSION,
        model=", ".join(entries),
    )
    return GatewayServer(record, gateway, registry, servicer, ports, flags.heartbeat_ms / 1000, keys, parts)


def _options(flags: GatewayFlags, entries: Mapping[str, ModelEntry]) -> GatewayOptions:
    longest = max(entry.limits.max_model_len_tokens for entry in entries.values())
    return GatewayOptions(
        policy=parse_policy(flags.split_policy),
        # Without chunked prefill a prefill range is one chunk, which is as long as the longest prompt.
        chunk_tokens=flags.chunk_size if flags.enable_chunked_prefill else max(longest, flags.block_size),
        max_attempts=flags.max_attempts,
        max_inflight_requests=flags.max_inflight_requests,
        max_inflight_tokens=flags.max_inflight_tokens,
        prefix_caching=flags.enable_prefix_caching,
        max_running_requests=flags.max_running_requests,
    )


def _folders(entries: Mapping[str, ModelEntry]) -> ServedFolders:
    return ServedFolders(
        {name: entry.folder for name, entry in entries.items() if entry.folder is not None},
        {alias: name for name, entry in entries.items() for alias in entry.aliases if alias not in entries},
    )


def _entries(flags: GatewayFlags, prepared: PreparedModel | None) -> dict[str, ModelEntry]:
    """Reads all models that the flags name, by served name. Raises ConfigError."""
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
    parts: Sequence[GatewayPart],
) -> Ports:
    """Listens on the gateway's ports. Raises OSError for an address that cannot be bound, and leaves nothing
    half-started."""
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    server = await rpc.start_server(
        f"{host}:{flags.grpc_port}",
        [(SERVICE, lambda s: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, s))],
        credentials=None if identity is None else tls.server_credentials(identity),
        interceptors=[KeyCheck(gateway), RawGenerate(servicer.raw_calls)],
        max_calls=MAX_GRPC_CALLS,
        max_message_bytes=flags.max_message_bytes,
        share_port=flags.share_ports,
    )
    async with contextlib.AsyncExitStack() as started:
        started.push_async_callback(server.stop, 0)
        http = await start_http(gateway, flags, identity, parts)
        started.push_async_callback(http.stop, 0)
        probe: rpc.RunningServer | None = None
        if flags.probe_listen:
            credentials = rpc.internal_credentials(flags.probe_listen)
            probe = await rpc.start_server(flags.probe_listen, [], credentials=credentials, serving=False)
        started.pop_all()
    return Ports(server, http, probe)


async def _tell_ready(probe: rpc.RunningServer, gateway: Gateway) -> None:
    """Keeps the health at the probes' address up to date: it says whether a request would be served now, and under the
    name of each prefill worker whether that one could compute its prompt."""
    told = frozenset[str]()
    while True:
        await probe.set_serving(not gateway.not_ready())
        before, told = told, gateway.cluster.known(PREFILL)
        for names, serving in ((before - told, False), (told - before, True)):
            if names:
                await probe.set_serving(serving, tuple(names))
        await asyncio.sleep(READY_POLL_S)


async def _warm_up(gateway: Gateway) -> None:
    await asyncio.sleep(WARM_UP_AFTER_S)
    await gateway.warm_up()


async def _follow(keys: KeyFile, gateway: Gateway) -> None:
    """Takes the API keys anew, soon after their file has changed."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        try:
            if await asyncio.to_thread(keys.refresh):
                gateway.take_keys(keys.ring)
        except Exception:
            # A defect must not end all later changes, because a key that was taken away would stay good.
            log.exception("the keys could not be read again")


def model_entry(model: PreparedModel, flags: AnswerFlags) -> ModelEntry:
    """Collects what a gateway needs to know of a model. Reads files; raises ConfigError."""
    guards = not flags.allow_special_tokens_in_messages
    tokenizer = ModelTokenizer.load(model.folder, flags.chat_template, guards=guards)
    file = model.folder / "tokenizer.json"
    formats = formats_of(FormatSource(tokenizer, file, model.vocab_size, model.eos_token_ids), flags)
    log.info(
        "model %s: tool-call parser %s, reasoning parser %s", model.name, formats.tool_parser, formats.reasoning_parser
    )
    return ModelEntry(
        limits=ModelLimits(model.name, model.max_model_len, model.vocab_size, model.original_tokens),
        aliases=model.aliases,
        fingerprint=model.fingerprint,
        eos_token_ids=model.eos_token_ids,
        tokenizer=tokenizer,
        template=ChatTemplate(
            tokenizer.chat_template,
            tokenizer.specials,
            marks=tokenizer.marks,
            spells_out=formats.spells_out,
            in_channels=formats.in_channels,
            defaults=flags.default_chat_template_kwargs,
        ),
        formats=formats,
        weights=model.weights,
        folder=model.folder,
        sampling=default_sampling(model, flags),
    )
