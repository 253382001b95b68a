"""Production components as simulated processes, with the flags of a schedule's cluster shape.

In production :mod:`pillion.supervisor.component_process` ends the process; here an exit is a return value.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lab.simulator.hash_model import FINGERPRINT, MODEL_NAME, VOCAB_SIZE, layout_of, loaded
from lab.simulator.lives import SimTurn
from lab.simulator.schedule import BLOCK_TOKENS, MAX_MODEL_LEN, ClusterShape
from pillion.config import DecodeFlags, GatewayFlags, KVNodeFlags, PrefillFlags
from pillion.decode_service.assemble import start_decode
from pillion.errors import ConfigError
from pillion.gateway.assemble import serve_models
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.gateway_server import GatewayServer, Ports
from pillion.gateway.grpc_api.gateway_servicer import GatewayServicer
from pillion.gateway.request.validation import ModelLimits
from pillion.gateway.tokens.answer_text import Spellings
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.kvstore.assemble import start_kvnode
from pillion.kvstore.tiers.disk_tier.disk_files import PAGE_BYTES
from pillion.net import rpc
from pillion.net.addresses import IN_PROCESS
from pillion.prefill_service.assemble import start_prefill
from pillion.settings.node_limits import NodeLimits
from pillion.settings.speculative_config import NO_SPECULATION, SpeculativeConfig
from pillion.supervisor.restarts import EXIT_CONFIG
from pillion.v1 import gateway_pb2_grpc

REDIS_URL = "redis://simulated"
STOP_GRACE_S = 1.0


def address_of(name: str) -> str:
    """Return the address of a component, the same in each of its lives."""
    return f"{IN_PROCESS}{name}"


def node_flags(shape: ClusterShape, name: str, disk_path: str) -> KVNodeFlags:
    """Return the flags of a KV node; ``disk_path``: empty without a disk."""
    return KVNodeFlags(
        node_id=name,
        node_listen=address_of(name),
        node_advertise=address_of(name),
        attach_socket=name,
        redis_url=REDIS_URL,
        heartbeat_ms=shape.heartbeat_ms,
        heartbeat_timeout_ms=shape.timeout_ms,
        kv_pool_bytes=shape.slots * layout_of(BLOCK_TOKENS).block_bytes,
        kv_transport="grpc",
        disk_path=disk_path,
        disk_bytes=shape.disk_blocks * PAGE_BYTES,
        keeper_socket=name if shape.kept else "",
    )


def worker_flags(shape: ClusterShape, name: str) -> dict[str, Any]:
    """Return the flags of both kinds of workers."""
    return {
        "component_id": name,
        "listen": address_of(name),
        "advertise": address_of(name),
        "attach_socket": shape.node_of(name),
        "redis_url": REDIS_URL,
        "heartbeat_ms": shape.heartbeat_ms,
        "heartbeat_timeout_ms": shape.timeout_ms,
        "block_size": BLOCK_TOKENS,
        "cpu_threads": 1,
        "max_model_len": MAX_MODEL_LEN,
    }


async def start_component(shape: ClusterShape, name: str, backend: Any, turn: SimTurn, disk_path: str) -> Any:
    """Start a component, a standby once ``turn`` arrives. Only workers have a ``backend``, and only KV nodes a
    ``disk_path``. Raises ConfigError."""
    role = name.rpartition("-")[0]
    if role not in ("prefill", "decode") and turn.waiting:
        await turn.wait()
    if role == "kvnode":
        return await start_kvnode(node_flags(shape, name, disk_path), NodeLimits(fetch_timeout_s=1.0))
    if role == "gateway":
        return await start_simulated_gateway(shape, name)
    flags = worker_flags(shape, name)

    def factory(*_: Any) -> Any:
        return loaded(MAX_MODEL_LEN, backend)

    if role == "prefill":
        prefill = PrefillFlags(**flags, max_num_batched_prefill_tokens=shape.step_tokens)
        return await start_prefill(prefill, backend_factory=factory, turn=turn)
    draft_tokens = (
        SpeculativeConfig(method=shape.drafter, num_speculative_tokens=3) if shape.drafter else NO_SPECULATION
    )
    decode = DecodeFlags(
        **flags,
        max_num_batched_tokens=shape.step_tokens,
        max_num_seqs=shape.max_seqs,
        speculative_config=draft_tokens,
    )
    # 1 % of a small pool would be 0.
    return await start_decode(decode, backend_factory=factory, turn=turn, partial_block_percent=5)


class _NoHttp:
    """The HTTP server of a gateway without one."""

    address = ""

    def __init__(self) -> None:
        self.task: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stop(self, grace_s: float) -> None:
        """Do nothing."""


class _NoTexts:
    """A tokenizer without processes: prompts of a simulated world are ids."""

    async def warm_up(self) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""


class _SerializedServicer:
    """A gateway's servicer called with bytes, as by its server's interceptor; answers are copied, since the servicer
    reuses one message."""

    def __init__(self, servicer: GatewayServicer) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servicer, name)

    async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        responses: Any = self._servicer.Generate(request.SerializeToString(), context)
        async with contextlib.aclosing(responses):
            async for response in responses:
                yield type(response).FromString(response.SerializeToString())


def _tokenizer() -> ModelTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    codec = tokenizers.Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(alphabet)}, merges=[]))
    codec.decoder = decoders.ByteLevel()
    return ModelTokenizer(codec, {}, "", None, False, False, Spellings(codec))


def gateway_flags(shape: ClusterShape, name: str) -> GatewayFlags:
    """Return the flags of a gateway."""
    return GatewayFlags(
        model=MODEL_NAME,
        component_id=name,
        redis_url=REDIS_URL,
        heartbeat_ms=shape.heartbeat_ms,
        heartbeat_timeout_ms=shape.timeout_ms,
        block_size=BLOCK_TOKENS,
        split_policy=shape.policy,
        chunk_size=shape.chunk_tokens,
        max_inflight_requests=64,
        max_inflight_tokens=64 * MAX_MODEL_LEN,
    )


async def start_simulated_gateway(shape: ClusterShape, name: str) -> GatewayServer:
    """Start a gateway with gRPC only."""
    nothing: Any = _NoTexts()
    entry = ModelEntry(
        limits=ModelLimits(MODEL_NAME, MAX_MODEL_LEN, VOCAB_SIZE),
        fingerprint=FINGERPRINT,
        eos_token_ids=(),
        tokenizer=_tokenizer(),
        template=nothing,
    )

    async def listen(gateway: Gateway, servicer: GatewayServicer, more_routes: object) -> Ports:
        served: Any = _SerializedServicer(servicer)
        server = await rpc.start_server(
            address_of(name), [("", lambda s: gateway_pb2_grpc.add_GatewayServicer_to_server(served, s))]
        )
        http: Any = _NoHttp()
        return Ports(server, http)

    return await serve_models(gateway_flags(shape, name), {MODEL_NAME: entry}, listen)


def exit_status(error: Exception) -> int:
    """Return the exit status of a component whose start failed, as :mod:`pillion.cli.app` would."""
    return EXIT_CONFIG if isinstance(error, ConfigError) else 1
