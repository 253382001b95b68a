"""The gateway behind its two ports: it checks, tokenizes, admits and runs requests. It knows no protocol.

generate: check fields -> enter (bounds) -> tokenize -> weigh (prompt tokens) -> quotas -> turn -> Generation.start
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from opentelemetry import context as otel_context
from opentelemetry import trace

from pillion._version import VERSION
from pillion.errors import DeadlineExceeded, PermissionDenied, PillionError, Unauthenticated, Unavailable
from pillion.gateway.admission.admission import Admission, AdmissionPermit, TenantSlots
from pillion.gateway.admission.api_keys import Keyring
from pillion.gateway.admission.shared_quotas import SharedQuotas
from pillion.gateway.admission.tenants import OPEN, Tenant, cache_salt
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.planning.cluster_snapshot import SplitPolicy
from pillion.gateway.request.job import Job
from pillion.gateway.request.request_telemetry import (
    CHAT,
    TEXT,
    GatewayMeter,
    begin_span,
    describe_span,
    end_refused_span,
    readings,
)
from pillion.gateway.request.runner import Generation
from pillion.gateway.request.validation import (
    ModelLimits,
    check_length,
    check_model,
    check_pool,
    check_request,
    prompt_field,
    resolve,
)
from pillion.gateway.tokens.answer_text import AnswerText
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.tokenizer import TOKENIZER_THREADS, ModelTokenizer, TokenizerPool
from pillion.observability import telemetry
from pillion.observability.metrics import Meters, MetricFamily
from pillion.types import ClusterStatus, GenerateRequest, ModelInfo, SamplingParams, Usage

STOPPING = "this gateway is stopping"
# A client may come again at once: it reaches another gateway, or the next one behind this port.
DRAIN_RETRY_MS = 100
# Prompts of one tenant that may wait for a tokenizer: the next one has to be there when a thread is free.
TENANT_TEXTS_AT_ONCE = 2 * TOKENIZER_THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that this gateway can tokenize for."""

    limits: ModelLimits
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    tokenizer: ModelTokenizer
    template: ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """The flags that decide about requests. ``max_running_requests`` 0: as many as the workers have slots for."""

    policy: SplitPolicy
    chunk_tokens: int
    max_attempts: int
    max_inflight_requests: int
    max_inflight_tokens: int
    prefix_caching: bool
    max_running_requests: int = 0


class Gateway:
    """Serves requests.

    Args:
        models: by served name.
        cluster: connections to all components.
        ring: API keys; None serves everybody.
        quotas: by default counted by this gateway alone.
    """

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        cluster: Cluster,
        options: GatewayOptions,
        ring: Keyring | None = None,
        quotas: SharedQuotas | None = None,
    ) -> None:
        self._models = models
        self.cluster = cluster
        self._options = options
        self._ring = ring
        self._quotas = quotas or SharedQuotas()
        self._admission = Admission(options.max_inflight_requests, options.max_inflight_tokens, self._slots)
        self._pool = TokenizerPool()
        self._texts = TenantSlots(TENANT_TEXTS_AT_ONCE)
        self._draining = False
        self._arrivals = secrets.randbelow(1024)
        self.meters = Meters()
        self._meter = GatewayMeter(self.meters)
        self.meters.watch(lambda: readings(self.active_requests, self.waiting_requests, cluster.index.available))
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0

    def tenant_of(self, authorization: str) -> Tenant:
        """The tenant of a call, by the value of its Authorization header. Raises Unauthenticated."""
        try:
            return OPEN if self._ring is None else self._ring.tenant_of(authorization)
        except Unauthenticated as error:
            self._meter.refused(error)
            raise

    def take_keys(self, ring: Keyring) -> None:
        """Replaces the API keys. Running requests go on; what a tenant has spent stays spent."""
        self._ring = ring
        self._quotas.keep(ring.tenants)
        self._admission.keep(ring.tenants)
        self._texts.keep(ring.tenants)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
    ) -> Generation:
        """A started generation, to be read or cancelled by the caller.

        Args:
            request: as the client sent it.
            tenant: the sender, as :meth:`tenant_of` returns it; None is served by an open gateway only.
            timeout_s: time the client gives it, None for no limit.
            parent: the client's trace context.

        Raises:
            NotFound: no such model. InvalidRequest: with every wrong field. Overloaded: a bound or a quota is met, or
                the wait would be longer than ``timeout_s``. DeadlineExceeded: no time left. Unauthenticated:
                ``tenant`` is None.
            Unavailable: the gateway is stopping; another one may take the request at once.
        """
        if self._draining:
            raise Unavailable(STOPPING, DRAIN_RETRY_MS)
        tenant = self._known(tenant)
        arrived = time.monotonic()
        deadline = None if timeout_s is None else arrived + timeout_s
        span = begin_span(request, parent)
        try:
            model = self._models[check_model(request.model, self._models)]
            check_request(request, model.limits)
            field = "sampling.best_of" if request.sampling.best_of else "sampling.n"
            permit = self._admission.enter(tenant, _generated(request.sampling), field)
        except PillionError as error:
            self._meter.refused(error)
            end_refused_span(span, error)
            raise
        try:
            # After the bounds, so that a request that they refuse counts for no quota.
            self._quotas.take_request(tenant, arrived)
            with telemetry.child("tokenize", span) as tokenizing:
                prompt = await self._tokenize(request, model, tenant)
                tokenizing.set_attribute("pillion.prompt_tokens", len(prompt))
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded("the request's deadline passed while it was tokenized")
            self._longest(request, model, prompt)
            self._admission.weigh(permit, len(prompt))
            with telemetry.child("admission", span):
                await self._turn(permit, model.limits.name, request.priority, arrived, deadline)
            return self._begin(request, model, prompt, permit, arrived, deadline, span)
        except BaseException as error:
            # A request that was admitted leaves, also where its caller was cancelled.
            self._admission.leave(permit)
            if isinstance(error, PillionError):
                self._meter.refused(error)
            end_refused_span(span, error)
            raise

    def entry(self, name: str) -> ModelEntry:
        """The model that ``name`` means; "" means the only one. Raises NotFound and InvalidRequest."""
        return self._models[check_model(name, self._models)]

    async def tokenize(
        self, request: GenerateRequest, tenant: Tenant | None = None, *, bare: bool = False
    ) -> tuple[int, ...]:
        """The ids of a prompt as they would be computed; ``bare`` leaves out special tokens that are added to a text.
        Counts as a request. Raises InvalidRequest and Overloaded."""
        model, tenant = self.entry(request.model), self._known(tenant)
        check_request(request, model.limits)
        permit = self._admission.enter(tenant)
        try:
            await self._count(tenant)
            if bare and request.text:
                async with self._texts.of(tenant):
                    return await self._pool.run(model.tokenizer.encode_bare, request.text)
            return await self._tokenize(request, model, tenant)
        finally:
            self._admission.leave(permit)

    async def detokenize(self, name: str, token_ids: tuple[int, ...], tenant: Tenant | None = None) -> str:
        """The text of ids that the model knows, special tokens skipped; counts as a request. Raises Overloaded."""
        tenant = self._known(tenant)
        permit = self._admission.enter(tenant)
        try:
            await self._count(tenant)
            return await self.text_of(name, token_ids, tenant)
        finally:
            self._admission.leave(permit)

    async def _count(self, tenant: Tenant) -> None:
        """Counts a request whose prompt is not computed. Raises Overloaded."""
        now = time.monotonic()
        self._quotas.take_request(tenant, now)
        await self._quotas.confirm(tenant, now)

    async def text_of(self, name: str, token_ids: tuple[int, ...], tenant: Tenant) -> str:
        """The text of ids, for a request that has been counted already."""
        async with self._texts.of(tenant):
            return await self._pool.run(self.entry(name).tokenizer.decode, token_ids)

    def models(self) -> tuple[ModelInfo, ...]:
        """The models that live workers serve now."""
        return tuple(
            ModelInfo(name, entry.limits.max_model_len_tokens, entry.fingerprint)
            for name, entry in sorted(self._models.items())
            if not self.missing(name)
        )

    def missing(self, name: str) -> str:
        """What keeps a model from being served, in words; empty where it is served."""
        try:
            served = self.cluster.served(name, self._models[name].fingerprint)
        except Unavailable as error:
            return error.message
        nodes = {component.node_id for component in served.components if component.role == "kvnode"}
        if not any(component.role == "decode" and component.node_id in nodes for component in served.components):
            return f"no KV node lives for the decode workers of model {name!r}"
        return ""

    def not_ready(self) -> str:
        """Why no request could be served now; empty when one could."""
        if self._draining:
            return STOPPING
        missing = [self.missing(name) for name in self._models]
        return "" if "" in missing else "; ".join(missing)

    def metrics(self, tenant: Tenant | None = None) -> list[MetricFamily]:
        """This gateway's metrics. Raises PermissionDenied for a tenant that is no operator."""
        self._operators_only(tenant)
        return self.meters.collect()

    def status(self, tenant: Tenant | None = None) -> ClusterStatus:
        """The cluster for ``pillion status``, with totals of all gateways. Raises PermissionDenied for a tenant that is
        no operator."""
        self._operators_only(tenant)
        others = self.cluster.other_gateways()
        prompts, cached, completions = self.totals()
        return ClusterStatus(
            version=VERSION,
            components=tuple(record.status() for record in self.cluster.view.aged(time.monotonic())),
            active_requests=self._admission.requests + sum(one.running_requests for one in others),
            prompt_tokens=prompts + sum(one.prompt_tokens for one in others),
            cached_tokens=cached + sum(one.cached_tokens for one in others),
            completion_tokens=completions + sum(one.completion_tokens for one in others),
            index_available=self.cluster.index.available,
        )

    def totals(self) -> tuple[int, int, int]:
        """Tokens of ended requests: prompt tokens, how many of them were cached, and generated tokens."""
        return self._prompt_tokens, self._cached_tokens, self._completion_tokens

    @property
    def active_requests(self) -> int:
        """Requests under way; each answer counts."""
        return self._admission.requests

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for their turn."""
        return self._admission.waiting

    @property
    def active_tokens(self) -> int:
        """Prompt tokens of the requests under way."""
        return self._admission.tokens

    def drain(self) -> None:
        """Refuses new requests from now on; those under way go on."""
        self._draining = True

    async def aclose(self) -> None:
        """Ends tokenizing and reports quotas. Readers of generations cancel these themselves."""
        self._pool.close()
        await self._quotas.aclose()
        for entry in self._models.values():
            await entry.template.aclose()

    def _known(self, tenant: Tenant | None) -> Tenant:
        if tenant is None and self._ring is not None:
            raise Unauthenticated("an API key is needed")
        return tenant or OPEN

    def _operators_only(self, tenant: Tenant | None) -> None:
        if not self._known(tenant).operator:
            raise PermissionDenied("only a tenant with operator = true may see the cluster")

    def _slots(self, model: str) -> int:
        """Answers that the model's workers are given at once; 0 while no bound is known."""
        return self._options.max_running_requests or self.cluster.request_slots(model)

    async def _tokenize(self, request: GenerateRequest, model: ModelEntry, tenant: Tenant) -> tuple[int, ...]:
        prompt = request.token_ids
        if not prompt:
            async with self._texts.of(tenant):
                if request.messages:
                    rendered = await model.template.render(request.messages)
                    prompt = await self._pool.run(model.tokenizer.encode_chat, rendered)
                else:
                    prompt = await self._pool.run(model.tokenizer.encode_text, request.text)
        check_length(len(prompt), prompt_field(request), model.limits)
        return prompt

    async def _turn(
        self, permit: AdmissionPermit, model: str, priority: int, arrived: float, deadline: float | None
    ) -> None:
        """Waits until a weighed request may go to the workers. Raises Overloaded and DeadlineExceeded."""
        tenant = permit.tenant
        await self._quotas.take_prompt(tenant, permit.tokens, time.monotonic())
        try:
            await self._admission.turn(permit, model, tenant.capped(priority), arrived, deadline)
        except BaseException:
            self._quotas.spend(tenant, -permit.tokens, time.monotonic())
            raise

    def _longest(self, request: GenerateRequest, model: ModelEntry, prompt: tuple[int, ...]) -> int:
        """The longest prompt and answer, in tokens, that model and pools allow. Raises InvalidRequest."""
        name, most = model.limits.name, model.limits.max_model_len_tokens
        pool_tokens = self.cluster.capacity_tokens(name)
        return check_pool(len(prompt), prompt_field(request), request.sampling.max_tokens, most, pool_tokens)

    def _begin(
        self,
        request: GenerateRequest,
        model: ModelEntry,
        prompt: tuple[int, ...],
        permit: AdmissionPermit,
        arrived: float,
        deadline: float | None,
        span: trace.Span,
    ) -> Generation:
        limits, options, asked = model.limits, self._options, request.sampling
        cluster = self.cluster
        longest = self._longest(request, model, prompt)
        common = cluster.common_tokens(limits.name)
        if asked.max_tokens is None and common is not None and len(prompt) < common:
            # Every node can hold the request, so another one can go on whichever is lost.
            longest = min(longest, common)
        bounds = replace(limits, max_model_len_tokens=longest)
        resolved = resolve(asked, len(prompt), model.eos_token_ids, bounds, secrets.randbits(63))
        self._arrivals += 1
        job = Job(
            request_id=request.request_id or f"req-{secrets.token_hex(12)}",
            model=limits.name,
            fingerprint=model.fingerprint,
            prompt=prompt,
            resolved=resolved,
            # Without prefix caching the salt is used once: blocks of other requests do not match, its own still do.
            cache_salt=cache_salt(permit.tenant, request.cache_salt)
            if options.prefix_caching
            else secrets.token_hex(16),
            policy=options.policy,
            chunk_tokens=options.chunk_tokens,
            max_attempts=options.max_attempts,
            arrived=arrived,
            deadline=deadline,
            spread=self._arrivals,
            priority=permit.tenant.capped(request.priority),
            answers=asked.n or 1,
            show_logprobs=asked.logprobs is not None,
            prefix_caching=options.prefix_caching,
        )
        describe_span(span, job, is_chat=bool(request.messages))
        operation = CHAT if request.messages else TEXT
        meter = self._meter.request(limits.name, operation, arrived, _generated(asked))
        stop_ids = frozenset(resolved.stop_token_ids)
        answers = [
            AnswerText(model.tokenizer.detokenizer(), asked.stop, stop_ids, resolved.sampling.min_tokens or 0)
            for _ in range(_generated(asked))
        ]

        def ended(usage: Usage) -> None:
            # A prompt that nobody could serve costs its tenant nothing.
            lost = generation.failed_unserved and not usage.completion_tokens
            spent = -permit.tokens if lost else usage.completion_tokens
            self._quotas.spend(permit.tenant, spent, time.monotonic())
            self._admission.leave(permit, usage.completion_tokens)
            self._prompt_tokens += usage.prompt_tokens
            self._cached_tokens += usage.cached_tokens
            self._completion_tokens += usage.completion_tokens

        generation = Generation(job, cluster, answers, span, meter, ended)
        generation.start()
        return generation


def _generated(sampling: SamplingParams) -> int:
    """Answers that are generated, of which the best ``n`` are given."""
    return sampling.best_of or sampling.n or 1
