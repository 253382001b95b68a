"""Computes prompts ahead and pins them, for `pillion cache` and the Messages API's cache_control.

warm:  the request with max_tokens 0, in the background --> computed while capacity is free
pin:   warm --> the plan's KV node pins the chain, within the tenant's quota there, until it expires
list, drop:  all KV nodes are queried; gateways store no pins

Pins are per tenant: its name goes with each call to a KV node, and its salt into the block hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from opentelemetry import context as otel_context

from pillion.errors import (
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PillionError,
    Unauthenticated,
    Unavailable,
)
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.gateway import Gateway
from pillion.gateway.links.node_link import NodeLink
from pillion.gateway.request.admitted_request import PlacedPrefix
from pillion.gateway.request.request_runner import RequestRunner
from pillion.kvstore.hashing import HASH_BYTES
from pillion.kvstore.ledger.pin_table import MAX_PREFIX_PIN_S
from pillion.types import GenerateRequest, PinnedPrefix, SamplingParams, WarmedPrefix
from pillion.v1.kvnode_pb2 import PinPrefixRequest, PrefixPin

log = logging.getLogger("pillion.gateway")

T = TypeVar("T")

DEFAULT_TTL_S = 86_400
MAX_TTL_S = int(MAX_PREFIX_PIN_S)
# Timeout of the work for cache_control breakpoints, which delays the answer.
EPHEMERAL_WAIT_S = 0.25
# Names of pins that users choose. Those of cache_control have a colon, so that the two cannot collide.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_EPHEMERAL = re.compile(r"cache_control:[0-9a-f]{16}")
# Hex digits of a hash in the name of an unnamed pin.
_NAME_DIGITS = 16


class PrefixPins:
    """Prompts that are computed ahead and pinned through ``gateway``. Methods raise Unauthenticated without a tenant if
    keys are required, and PermissionDenied if prefixes are not cached."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def warm(
        self,
        request: GenerateRequest,
        tenant: Tenant | None,
        *,
        pin: bool = False,
        name: str = "",
        ttl_s: int = 0,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
    ) -> WarmedPrefix:
        """Compute the missing KV of a prompt, and optionally pin it.

        Args:
            request: a request, of which only prompt, model and salt are used.
            name: the pin's name; "" for one derived from the prompt.
            ttl_s: lifetime of the pin; 0: DEFAULT_TTL_S.

        Raises what Gateway.generate raises, and Overloaded if the pin exceeds a quota; the prompt is computed then, but
        not pinned.
        """
        known = self._require_tenant(tenant)
        if name and not _NAME.fullmatch(name):
            raise InvalidRequest.of(FieldViolation("name", "up to 128 letters, digits and . _ - are allowed"))
        if not 0 <= ttl_s <= MAX_TTL_S:
            raise InvalidRequest.of(FieldViolation("ttl_s", f"{ttl_s} is not in [0, {MAX_TTL_S}]"))
        prompt_only = replace(request, sampling=SamplingParams(max_tokens=0), resume=None)
        background = known.in_background()
        runner = await self._gateway.generate(
            prompt_only, tenant=background, timeout_s=timeout_s, parent=parent, streamed=False
        )
        try:
            async for _ in runner:
                pass
        finally:
            runner.cancel()
        usage, pinned = runner.usage(), None
        if pin:
            pinned = await self._pin(runner, known, name, ttl_s or DEFAULT_TTL_S)
        return WarmedPrefix(usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens, pinned)

    async def pin_ephemeral(self, placed: PlacedPrefix, tenant: Tenant, tokens: int, ttl_s: int, model: str) -> bool:
        """Pin the whole blocks of a prompt's first ``tokens`` for a cache_control, best effort. Return False if that
        failed, e.g. for a quota, or took more than EPHEMERAL_WAIT_S."""
        hashes = placed.hashes[: tokens // placed.block_size * HASH_BYTES]
        if not hashes:
            return False
        name = f"cache_control:{hashes[-HASH_BYTES:].hex()[:_NAME_DIGITS]}"
        try:
            async with asyncio.timeout(EPHEMERAL_WAIT_S):
                await self._pin_at(placed, hashes, tenant, name, ttl_s, tokens, model, ephemeral=True)
        except (PillionError, TimeoutError) as error:
            log.debug("cache_control failed: %s", error)
            return False
        return True

    async def pins(self, tenant: Tenant | None) -> list[PinnedPrefix]:
        """Return the tenant's pins at all KV nodes that answer, by name. Raises Unavailable if no node answers."""
        owner = self._require_tenant(tenant).name

        async def ask(link: NodeLink) -> list[PinnedPrefix]:
            return [_to_public(pin, link.node_id) for pin in await link.client.list_prefix_pins(link.epoch, owner)]

        pins = [pin for of_node in (await self._ask_all(ask))[0] for pin in of_node]
        return sorted(pins, key=lambda pin: (pin.name, pin.node_id))

    async def drop(self, name: str, tenant: Tenant | None) -> None:
        """Remove a pin of the tenant. Raises NotFound if no KV node has it, and Unavailable if no node that answers has
        it but a node does not answer."""
        owner = self._require_tenant(tenant).name
        if not _NAME.fullmatch(name) and not _EPHEMERAL.fullmatch(name):
            raise NotFound("there is no pin of this name")

        async def ask(link: NodeLink) -> bool:
            return await link.client.unpin_prefix(link.epoch, owner, name)

        removed, error = await self._ask_all(ask)
        if any(removed):
            return
        if error is not None:
            raise Unavailable(f"no KV node that answers has a pin {name!r}, and one did not answer: {error.message}")
        raise NotFound(f"there is no pin {name!r}")

    def _require_tenant(self, tenant: Tenant | None) -> Tenant:
        """Return the tenant, OPEN without keys. Raises Unauthenticated and PermissionDenied."""
        if not self._gateway.caches_prefixes:
            raise PermissionDenied("this gateway does not cache prefixes: --no-enable-prefix-caching was given")
        if tenant is None and self._gateway.needs_keys:
            raise Unauthenticated("an API key is needed")
        return tenant or OPEN

    async def _pin(self, runner: RequestRunner, tenant: Tenant, name: str, ttl_s: int) -> PinnedPrefix:
        placed, tokens = runner.placed_prefix(), len(runner.admitted.prompt)
        if placed is None or not placed.hashes:
            size = placed.block_size if placed is not None else 0
            raise InvalidRequest(f"the prompt of {tokens} tokens has no whole block of {size} tokens to pin")
        name = name or f"prefix-{hashlib.sha256(placed.hashes).hexdigest()[:_NAME_DIGITS]}"
        pin = await self._pin_at(placed, placed.hashes, tenant, name, ttl_s, tokens, runner.admitted.model)
        # A name refers to one prompt, so pins with this name at other nodes are removed.
        others = [link for link in self._gateway.cluster.nodes() if link.node_id != placed.node_id and link.alive]
        drops = (link.client.unpin_prefix(link.epoch, tenant.name, name) for link in others)
        await asyncio.gather(*drops, return_exceptions=True)
        return _to_public(pin, placed.node_id)

    async def _pin_at(
        self,
        placed: PlacedPrefix,
        hashes: bytes,
        tenant: Tenant,
        name: str,
        ttl_s: int,
        tokens: int,
        model: str,
        *,
        ephemeral: bool = False,
    ) -> PrefixPin:
        link = self._gateway.cluster.node(placed.node_id)
        most_blocks = tenant.max_pinned_tokens // placed.block_size
        if tenant.max_pinned_tokens and not most_blocks:
            # For the KV node, 0 means no limit.
            size = f"a block of {placed.block_size} tokens"
            raise Overloaded(f"max_pinned_tokens of {tenant.max_pinned_tokens} is less than {size}")
        request = PinPrefixRequest(
            epoch=link.epoch,
            owner=tenant.name,
            name=name,
            block_hashes=hashes,
            ttl_s=ttl_s,
            most_blocks=most_blocks,
            tokens=tokens,
            model=model,
            ephemeral=ephemeral,
        )
        return await link.client.pin_prefix(request)

    async def _ask_all(self, ask: Callable[[NodeLink], Awaitable[T]]) -> tuple[list[T], PillionError | None]:
        """Query all KV nodes. Return the answers, and the error of one that did not answer, if any. Raises Unavailable
        if no node answers."""
        links = [link for link in self._gateway.cluster.nodes() if link.alive]
        answers = await asyncio.gather(*map(ask, links), return_exceptions=True)
        results = [answer for answer in answers if not isinstance(answer, BaseException)]
        error: PillionError | None = None
        for answer in answers:
            if isinstance(answer, PillionError):
                error = answer
            elif isinstance(answer, BaseException):
                raise answer
        if not results:
            raise Unavailable("no KV node answers" if error is None else f"no KV node answers: {error.message}")
        return results, error


def _to_public(pin: PrefixPin, node_id: str) -> PinnedPrefix:
    return PinnedPrefix(
        name=pin.name,
        model=pin.model,
        tokens=pin.tokens,
        blocks=pin.blocks,
        present_blocks=pin.present_blocks,
        expires_in_s=pin.left_s,
        hits=pin.hits,
        node_id=node_id,
        ephemeral=pin.ephemeral,
    )
