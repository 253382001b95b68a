"""Assembly of a gateway: its parts, and the flags that enable them.

always                   OpenAI's API, Anthropic's Messages, Responses, prefix pins, embeddings and classification, gRPC
--model, --also-model    models with their tokenizers, chat templates and formats
--api-keys, --api-key    tenants and their quotas
--enable-lora            adapters
--enable-prefix-caching  read-ahead
--batch-path             batches        --record-path  bundles of requests        --ui  web page
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from starlette.routing import Route

from pillion._version import VERSION
from pillion.config import AnswerFlags, GatewayFlags, ServedModelFlags
from pillion.engine.checkpoints.generation_config import default_sampling
from pillion.engine.checkpoints.prepare import PreparedModel, prepare
from pillion.errors import ConfigError
from pillion.gateway.adapters.adapter_names import AdapterNames, load_adapters
from pillion.gateway.adapters.adapter_servicer import adapter_calls
from pillion.gateway.adapters.adapters_api import adapter_routes
from pillion.gateway.admission.api_keys import KeyFile
from pillion.gateway.admission.quotas import Quotas
from pillion.gateway.anthropic.anthropic_api import anthropic_routes
from pillion.gateway.batches.batch_calls import LineCalls
from pillion.gateway.batches.batch_folder import TENANT_PERCENT, BatchFolder
from pillion.gateway.batches.batch_runner import BatchRunner
from pillion.gateway.batches.batches_api import batch_routes
from pillion.gateway.formats.model_formats import ModelFormats, choose_formats
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.gateway.gateway_server import GatewayServer, Ports
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grammars.request_grammars import GrammarMaker
from pillion.gateway.grpc_api.gateway_servicer import GatewayServicer, KeyCheck, RawGenerate
from pillion.gateway.http_api.http_server import MoreRoutes, start_http
from pillion.gateway.http_api.model_calls import ModelCalls
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.planning.cluster_snapshot import parse_policy
from pillion.gateway.pooling.pooling_pages import pooling_routes
from pillion.gateway.pooling.text_servicer import text_calls
from pillion.gateway.pooling.vectors import GatewayVectors
from pillion.gateway.prefix_pins.prefix_servicer import prefix_calls
from pillion.gateway.prefix_pins.prefixes_api import prefix_routes
from pillion.gateway.read_ahead.read_ahead import ReadAhead
from pillion.gateway.recorder.recorder import Recorder
from pillion.gateway.request.admitted_request import GatewayOptions
from pillion.gateway.request.validation import ModelLimits
from pillion.gateway.responses.responses_api import responses_routes
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.gateway.ui.ui_api import ui_routes
from pillion.kvstore.index.index import Index
from pillion.kvstore.index.registry import Registry
from pillion.kvstore.index.shared_buckets import SharedBuckets
from pillion.kvstore.index.shared_loads import SharedLoads
from pillion.net import rpc, tls
from pillion.net.addresses import is_local
from pillion.net.descriptors import MIN_CONNECTIONS, connections_per_port
from pillion.settings.served_models import other_models
from pillion.v1 import gateway_pb2_grpc
from pillion.wire.registry import ComponentRecord

log = logging.getLogger("pillion.gateway")

SERVICE = "pillion.v1.Gateway"
# Max open calls of the public gRPC service, health watches included.
MAX_GRPC_CALLS = 8192

# Opens a gateway's ports; the last argument creates the HTTP routes of features. Raises OSError for an unusable
# address.
Listen = Callable[[Gateway, GatewayServicer, MoreRoutes], Awaitable[Ports]]


async def start_gateway(
    flags: GatewayFlags, *, prepared: PreparedModel | None = None, limits: GatewayLimits | None = None
) -> GatewayServer:
    """Start a gateway with checked flags. ``prepared`` is the model of --model, if it is prepared already. Raises
    ConfigError for an unusable model or a port in use."""
    if not flags.redis_url:
        raise ConfigError("the gateway needs --redis-url")
    has_keys = bool(flags.api_keys or flags.api_key)
    keys = await asyncio.to_thread(KeyFile, flags.api_keys, flags.api_key) if has_keys else None
    identity = tls.identity_of(flags.tls_cert, flags.tls_key, flags.tls_ca)
    if has_keys and not flags.tls_cert and not is_local(f"{flags.host}:0"):
        log.warning("API keys travel in plain text to %s: give --tls-cert, or end TLS before this port", flags.host)
    entries = await asyncio.to_thread(_entries, flags, prepared)

    async def listen(gateway: Gateway, servicer: GatewayServicer, more_routes: MoreRoutes) -> Ports:
        return await _listen(flags, gateway, servicer, identity, more_routes)

    return await serve_models(flags, entries, listen, keys, limits)


async def serve_models(
    flags: GatewayFlags,
    entries: Mapping[str, ModelEntry],
    listen: Listen,
    keys: KeyFile | None = None,
    limits: GatewayLimits | None = None,
) -> GatewayServer:
    """Connect a gateway of these models, by served name, to its cluster, then open its ports and start heartbeats. None
    for ``keys``: clients need no API key. Raises ConfigError as :func:`start_gateway` does."""
    limits = limits or GatewayLimits()
    component_id = flags.component_id or f"gateway-{os.getpid()}-{secrets.token_hex(3)}"
    registry = Registry(flags.redis_url, flags.heartbeat_timeout_ms)
    grace_s, loads = flags.heartbeat_timeout_ms / 1000, SharedLoads(flags.redis_url)
    cluster = Cluster(component_id, registry, Index(flags.redis_url), grace_s, loads)
    adapters = await asyncio.to_thread(_adapters, flags, entries, cluster) if flags.enable_lora else None
    # Without API keys there are no tenants with quotas.
    quotas = Quotas(None if keys is None else SharedBuckets(flags.redis_url))
    ring = None if keys is None else keys.ring
    reads_ahead = flags.enable_prefix_caching and limits.max_read_ahead
    read_ahead = ReadAhead(cluster, limits.max_read_ahead) if reads_ahead else None
    recorder = await asyncio.to_thread(Recorder, flags, limits, cluster.view.last_stall) if flags.record_path else None
    options = _options(flags, limits, entries)
    gateway = Gateway(entries, cluster, options, ring, quotas, adapters, read_ahead, recorder, limits)
    lines = LineCalls()
    batches = _batches(flags.batch_path, limits, gateway, lines) if flags.batch_path else None
    # Background work, which ends when the gateway drains, and resources, which are freed after the last call.
    background, resources = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    if adapters is not None:
        background.push_async_callback(adapters.stop)
    if read_ahead is not None:
        background.push_async_callback(read_ahead.stop)
    if recorder is not None:
        resources.push_async_callback(asyncio.to_thread, recorder.close)
    if batches is not None:
        background.push_async_callback(batches.stop)
        resources.callback(batches.close)
    await asyncio.gather(cluster.start(), *(entry.template.warm_up() for entry in entries.values()))
    vectors = GatewayVectors(gateway)
    # The mapping implements the service's other methods.
    servicer = GatewayServicer(  # type: ignore[abstract]
        gateway, {**prefix_calls(gateway), **text_calls(gateway, vectors), **adapter_calls(gateway)}
    )

    def more_routes(calls: ModelCalls, core: Sequence[Route]) -> list[Route]:
        routes = [
            *ui_routes(calls, flags),
            *anthropic_routes(calls, flags),
            *responses_routes(calls, flags),
            *prefix_routes(calls, flags),
            *pooling_routes(calls, vectors),
        ]
        # Lines of a batch may call these routes, but neither batches nor adapters.
        return [*routes, *batch_routes(calls, batches, lines, (*core, *routes)), *adapter_routes(calls)]

    try:
        ports = await listen(gateway, servicer, more_routes)
    except OSError as error:
        await resources.aclose()
        await gateway.aclose()
        await cluster.aclose()
        raise ConfigError(f"the gateway cannot listen: {error}") from None
    heartbeat_s = flags.heartbeat_ms / 1000
    if batches is not None:
        batches.start()
    if adapters is not None:
        adapters.start(heartbeat_s)
    record = _record(component_id, ports, entries)
    return GatewayServer(record, gateway, registry, servicer, ports, heartbeat_s, background, resources, keys)


def _record(component_id: str, ports: Ports, entries: Mapping[str, ModelEntry]) -> ComponentRecord:
    return ComponentRecord(
        component_id=component_id,
        role="gateway",
        address=ports.grpc.address,
        version=VERSION,
        model=", ".join(entries),
    )


def _options(flags: GatewayFlags, limits: GatewayLimits, entries: Mapping[str, ModelEntry]) -> GatewayOptions:
    longest = max(entry.limits.max_model_len_tokens for entry in entries.values())
    return GatewayOptions(
        policy=parse_policy(flags.split_policy),
        # Without chunked prefill, a prefill range is a single chunk.
        chunk_tokens=flags.chunk_size if flags.enable_chunked_prefill else max(longest, flags.block_size),
        max_attempts=limits.max_attempts,
        max_inflight_requests=flags.max_inflight_requests,
        max_inflight_tokens=flags.max_inflight_tokens,
        prefix_caching=flags.enable_prefix_caching,
        max_running_requests=limits.max_running_requests,
    )


def _batches(path: str, limits: GatewayLimits, gateway: Gateway, lines: LineCalls) -> BatchRunner:
    """Create the runner of the batches in --batch-path. Raises ConfigError."""
    folder = BatchFolder(
        path,
        max_bytes=limits.batch_bytes,
        file_bytes=limits.batch_file_bytes,
        keep_s=limits.batch_keep_days * 24 * 3600,
        tenant_percent=TENANT_PERCENT,
    )
    return BatchRunner(folder, lines.serve, gateway.tenant_named, gateway.meters, limits.max_batch_requests)


def _adapters(flags: GatewayFlags, entries: Mapping[str, ModelEntry], cluster: Cluster) -> AdapterNames:
    """Load the adapters of --lora-modules. Reads files. Raises ConfigError."""
    folders = {name: entry.folder for name, entry in entries.items() if entry.folder is not None}
    aliases = {alias: name for name, entry in entries.items() for alias in entry.aliases if alias not in entries}
    return load_adapters(folders, aliases, flags, cluster.nodes)


def _entries(flags: GatewayFlags, prepared: PreparedModel | None) -> dict[str, ModelEntry]:
    """Return all models of the flags, by served name. Reads files. Raises ConfigError."""
    served: list[ServedModelFlags] = [flags, *other_models(flags)]
    models = [prepared if prepared is not None else prepare(flags), *map(prepare, served[1:])]
    entries = {model.name: model_entry(model, chosen) for model, chosen in zip(models, served, strict=True)}
    if len(entries) < len(models):
        raise ConfigError(f"--also-model: two models have the same name; there are {', '.join(entries)}")
    return entries


async def _listen(
    flags: GatewayFlags,
    gateway: Gateway,
    servicer: GatewayServicer,
    identity: tls.Identity | None,
    more_routes: MoreRoutes,
) -> Ports:
    """Open all of the gateway's ports, or none. Raises OSError for an unusable address."""
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    max_connections = connections_per_port(2)
    server = await rpc.start_server(
        f"{host}:{flags.grpc_port}",
        [(SERVICE, lambda s: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, s))],
        credentials=None if identity is None else tls.server_credentials(identity),
        interceptors=[KeyCheck(gateway), RawGenerate(servicer.raw_calls)],
        max_connections=max_connections,
        max_calls=MAX_GRPC_CALLS,
        share_port=flags.share_ports,
    )
    async with contextlib.AsyncExitStack() as started:
        started.push_async_callback(server.stop, 0)
        http = await start_http(gateway, flags, identity, more_routes, max_connections)
        started.push_async_callback(http.stop, 0)
        probe: rpc.RunningServer | None = None
        if flags.probe_listen:
            credentials = rpc.internal_credentials(flags.probe_listen)
            probe = await rpc.start_server(
                flags.probe_listen, [], credentials=credentials, max_connections=MIN_CONNECTIONS, serving=False
            )
        started.pop_all()
    return Ports(server, http, probe)


def model_entry(model: PreparedModel, flags: AnswerFlags) -> ModelEntry:
    """Return a model with its tokenizer, chat template and formats. Reads files. Raises ConfigError."""
    guards = not flags.allow_special_tokens_in_messages
    tokenizer = ModelTokenizer.load(model.folder, flags.chat_template, guards=guards)
    formats = _formats(model, tokenizer, flags)
    checker = GrammarChecker(model.folder / "tokenizer.json", model.vocab_size, model.eos_token_ids)
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
            spelling=formats.spelling,
            defaults=flags.default_chat_template_kwargs,
        ),
        formats=formats,
        grammars=GrammarMaker(formats, checker),
        weights=model.weights,
        folder=model.folder,
        sampling=default_sampling(model, flags),
    )


def _formats(model: PreparedModel, tokenizer: ModelTokenizer, flags: AnswerFlags) -> ModelFormats:
    """Return a model's formats of reasoning and tool calls. Raises ConfigError."""
    formats = choose_formats(
        tokenizer.chat_template,
        tokenizer.codec,
        flags.tool_call_parser,
        flags.reasoning_parser,
        flags.enable_auto_tool_choice,
    )
    # EOS tokens cannot be part of a grammar.
    ids = {mark: number for mark, number in formats.mark_ids.items() if number not in model.eos_token_ids}
    return replace(formats, mark_ids=ids)
