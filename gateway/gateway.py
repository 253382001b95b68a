"""The gateway behind its two ports: it checks, tokenizes, admits and runs requests. It knows no protocol.

generate: check fields -> enter (bounds) -> tokenize -> weigh (prompt tokens) -> quotas -> turn -> Generation.start
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace

from pillion._version import VERSION
from pillion.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    PillionError,
    Unauthenticated,
    Unavailable,
)
from pillion.gateway.adapters.adapter_names import AdapterNames
from pillion.gateway.adapters.adapter_spread import AdapterSpread
from pillion.gateway.adapters.name_table import NamedAdapter
from pillion.gateway.admission.admission import RETRY_AFTER_MS, Admission, TenantSlots
from pillion.gateway.admission.api_keys import Keyring
from pillion.gateway.admission.shared_quotas import SharedQuotas
from pillion.gateway.admission.tenants import OPEN, Tenant, cache_salt, share_of
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.gateway.formats.answer_parts import AnswerParts
from pillion.gateway.formats.answer_reader import AnswerForm
from pillion.gateway.formats.model_formats import NO_FORMATS, ModelFormats, asks_for_calls
from pillion.gateway.grammars.answer_grammar import JoinedGrammar, join
from pillion.gateway.grammars.grammar_checker import GrammarChecker
from pillion.gateway.grammars.shapes import shape_bytes, shape_piece
from pillion.gateway.grammars.tool_pieces import answer_pieces
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.request.job import GatewayOptions, Job
from pillion.gateway.request.message_bounds import MAX_WAITING_BYTES
from pillion.gateway.request.request_telemetry import (
    CHAT,
    TEXT,
    RequestMeter,
    adapter_readings,
    begin_span,
    count_refused,
    describe_span,
    down_readings,
    end_refused_span,
    forecast_readings,
    readings,
)
from pillion.gateway.request.runner import Generation
from pillion.gateway.request.validation import (
    ModelLimits,
    check_ids,
    check_length,
    check_model,
    check_origin,
    check_pool,
    check_request,
    check_scores,
    prompt_field,
    resolve,
    too_long,
    tools_bytes,
    weight,
)
from pillion.gateway.scaling.worker_needs import GivenAnswer
from pillion.gateway.tokens.answer_text import AnswerText, ReadAnswerText
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.stops import stop_strings
from pillion.gateway.tokens.tokenizer import (
    LOOP_BYTES,
    TOKEN_BYTES,
    ModelTokenizer,
    TextTooLong,
    TokenizerPool,
    check_wanted,
)
from pillion.observability import telemetry
from pillion.observability.metrics import Meters, Values
from pillion.sampling_defaults import NEUTRAL, NO_DEFAULTS, joined
from pillion.types import ClusterStatus, GenerateRequest, ModelInfo, SamplingParams, Usage
from pillion.wire.registry import DOWN, ComponentRecord

T = TypeVar("T")

STOPPING = "this gateway is stopping"
# Longest time that the load of an adapter waits until all machines have it.
SPREAD_TIMEOUT_S = 30.0
# Jobs of one tenant that may be in line for a process that all tenants share, such as the one of a chat template: the
# next one has to be there when that is free.
TENANT_BOXED_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that this gateway can tokenize for. ``alias`` is another name by which clients may ask for it, or "";
    ``weights`` says how its weights are kept. ``sampling`` holds where a client gives no value. ``folder`` has its
    config.json; ``adapter`` is the one that a client's name meant."""

    limits: ModelLimits
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    tokenizer: ModelTokenizer
    template: ChatTemplate
    grammars: GrammarChecker
    formats: ModelFormats = NO_FORMATS
    alias: str = ""
    weights: str = ""
    folder: Path | None = None
    adapter: NamedAdapter | None = None
    sampling: SamplingParams = NO_DEFAULTS

    @property
    def name(self) -> str:
        """The name that answers give: that of the adapter, or of the model."""
        return self.limits.name if self.adapter is None else self.adapter.name


class Gateway:
    """Serves requests.

    Args:
        models: by served name.
        cluster: connections to all components.
        ring: API keys; None serves everybody.
        quotas: by default counted by this gateway alone.
        adapters: the names of adapters; None where there are none.
    """

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        cluster: Cluster,
        options: GatewayOptions,
        ring: Keyring | None = None,
        quotas: SharedQuotas | None = None,
        adapters: AdapterNames | None = None,
    ) -> None:
        self._models = models
        self.adapters = adapters
        self.adapter_spread: AdapterSpread | None = None
        if adapters is not None:
            self.adapter_spread = AdapterSpread(cluster.nodes, adapters.digests, adapters.store)
        # A name that was given goes before another model's alias.
        self._by_name = {entry.alias: entry for entry in models.values() if entry.alias} | dict(models)
        self.cluster = cluster
        self._options = options
        self._ring = ring
        self.quotas = quotas or SharedQuotas()
        self.admission = Admission(options.max_inflight_requests, options.max_inflight_tokens, self._slots)
        self._pool = TokenizerPool()
        self._boxes = TenantSlots(TENANT_BOXED_AT_ONCE)
        # Bytes of requests that are read on threads, or wait for it, by tenants.
        self._waiting_bytes: Counter[str] = Counter()
        self._draining = False
        self._arrivals = secrets.randbelow(1024)
        self.meters = Meters()
        admission, index, registry = self.admission, cluster.index, cluster.registry
        self.meters.watch(
            lambda: readings(admission.requests, admission.waiting, index.available, not registry.refusal)
        )
        self.meters.watch(lambda: forecast_readings(cluster.forecaster.forecasts))
        self.meters.watch(lambda: down_readings(cluster.view.of(DOWN)))
        # Running requests by the name of their adapter.
        self._running_adapters: Counter[str] = Counter()
        if adapters is not None:
            self.meters.watch(lambda: adapter_readings(self._running_adapters, adapters.max_loras))
        # Tokens of ended requests.
        self.totals = Usage(0, 0, 0)

    def tenant_of(self, authorization: str) -> Tenant:
        """The tenant of a call, by the value of its Authorization header. Raises Unauthenticated."""
        try:
            return OPEN if self._ring is None else self._ring.tenant_of(authorization)
        except Unauthenticated as error:
            count_refused(self.meters, error)
            raise

    def tenant_named(self, name: str) -> Tenant | None:
        """The tenant of this name, for work that goes on after its call; None where the keys no longer have it."""
        if self._ring is None:
            return None if name else OPEN
        return self._ring.tenants.get(name)

    @property
    def needs_keys(self) -> bool:
        """Whether every call needs an API key."""
        return self._ring is not None

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests reuse KV of others."""
        return self._options.prefix_caching

    def take_keys(self, ring: Keyring) -> None:
        """Replaces the API keys. Running requests go on; what a tenant has spent stays spent."""
        self._ring = ring
        self.quotas.keep(ring.tenants)
        self.admission.keep(ring.tenants)
        self._boxes.keep(ring.tenants)
        self._pool.keep(ring.tenants)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
        entry: ModelEntry | None = None,
    ) -> Generation:
        """A started generation, to be read or cancelled by the caller.

        Args:
            request: as the client sent it.
            tenant: the sender, as :meth:`tenant_of` returns it; None is served by an open gateway only.
            timeout_s: time the client gives it, None for no limit.
            parent: the client's trace context.
            entry: what the request's model meant when its call came; by default what it means now.

        Raises:
            NotFound: no such model. InvalidRequest: with every wrong field. Overloaded: a bound or a quota is met, or
                the wait would be longer than ``timeout_s``. DeadlineExceeded: no time left. Unauthenticated:
                ``tenant`` is None.
        """
        tenant = self._known(tenant)
        arrived = time.monotonic()
        deadline = None if timeout_s is None else arrived + timeout_s
        span = begin_span(request, parent)
        permit: AdmissionPermit | None = None
        try:
            model = entry or await self.find_entry(request.model, tenant)
            await self._check(request, model, tenant)
            permit = self._enter(request, model, tenant)
            # After the bounds, so that a request that they refuse counts for no quota.
            self.quotas.take_request(tenant, arrived)
            if not tenant.background:
                self.cluster.forecaster.arrived(model.limits.name)
            with telemetry.child("tokenize", span) as tokenizing:
                prompt, text = await self._tokenize(request, model, tenant)
                tokenizing.set_attribute("pillion.prompt_tokens", len(prompt))
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded("the request's deadline passed while it was tokenized")
            longest = self._longest(request, model, prompt)
            schemas = tools_bytes(request.tools) if asks_for_calls(request.tools) else 0
            form = await self.off_loop(tenant, schemas, model.formats.answer_form, request, text)
            scores = check_scores(request.sampling, len(prompt))
            grammar = await self._grammar(request, model, form, tenant)
            self.admission.weigh(permit, len(prompt), scores)
            job = self._job(request, model, prompt, longest, tenant, arrived, deadline)
            if grammar is not None:
                job = replace(job, grammar=grammar.text, grammar_fields=tuple(grammar.sources))
            answers = await self._answers(request, model, job, form, tenant)
            with telemetry.child("admission", span):
                await self._turn(permit, model.limits.name, request.priority, arrived, deadline)
            return self._start(request, model.name, job, answers, permit, span)
        except BaseException as error:
            # A request that was admitted leaves, also where its caller was cancelled.
            if permit is not None:
                self.admission.leave(permit)
            if isinstance(error, PillionError) and not (tenant.background and isinstance(error, Overloaded)):
                # What is refused in the background comes again by itself: no client is turned away.
                count_refused(self.meters, error)
            end_refused_span(span, error)
            raise

    def _enter(self, request: GenerateRequest, model: ModelEntry, tenant: Tenant) -> AdmissionPermit:
        """Admits a request. Raises as Admission.enter does; one that the gateway's own bounds refuse has arrived, too,
        and counts for the workers that are wanted."""
        field = "sampling.best_of" if request.sampling.best_of else "sampling.n"
        try:
            return self.admission.enter(tenant, _generated(request.sampling), field)
        except Overloaded as error:
            if not tenant.background and all("/" not in quota.subject for quota in error.quotas):
                self.cluster.forecaster.arrived(model.limits.name)
            raise

    async def check(self, request: GenerateRequest, tenant: Tenant | None) -> None:
        """Checks all fields but the length of a text. Raises NotFound, and InvalidRequest with every wrong field."""
        await self._check(request, await self.find_entry(request.model, tenant), tenant)

    async def _check(self, request: GenerateRequest, model: ModelEntry, tenant: Tenant | None) -> None:
        model.formats.check(request.tools)
        await self.off_loop(tenant, weight(request), check_request, request, model.limits)

    async def off_loop(self, tenant: Tenant | None, size_bytes: int, job: Callable[..., T], *arguments: Any) -> T:
        """Runs ``job(*arguments)``, which works through so many bytes: on a thread where they are more than LOOP_BYTES,
        in the tenant's turn. Raises what the job raises, and Overloaded where too many jobs wait."""
        if size_bytes <= LOOP_BYTES:
            return job(*arguments)
        tenant = self._known(tenant)
        waiting, own = self._waiting_bytes.total(), self._waiting_bytes[tenant.name]
        most = share_of(tenant, MAX_WAITING_BYTES, waiting - own)
        if own + size_bytes > most:
            raise Overloaded(f"more than {most} bytes of requests wait to be read", RETRY_AFTER_MS)
        self._waiting_bytes[tenant.name] += size_bytes
        try:
            return await self._pool.run(job, *arguments, tenant=tenant, size_bytes=size_bytes)
        finally:
            self._waiting_bytes[tenant.name] -= size_bytes
            self._waiting_bytes = +self._waiting_bytes

    @property
    def longest_tokens(self) -> int:
        """The longest context of all models."""
        return max(entry.limits.max_model_len_tokens for entry in self._models.values())

    async def find_entry(self, name: str, tenant: Tenant | None = None) -> ModelEntry:
        """Like :meth:`entry`, also for an adapter that another gateway has loaded just now."""
        if self.adapters is not None and name not in self._by_name:
            await self.adapters.look(name)
        return self.entry(name, tenant)

    def entry(self, name: str, tenant: Tenant | None = None) -> ModelEntry:
        """The model, perhaps with an adapter, that ``name`` means for a tenant, for the gateway itself without one; ""
        means the only one. Raises NotFound and InvalidRequest."""
        found = self._named(name)
        if found is not None and self._may_use(tenant, found):
            return found
        known = [one for one, entry in self._models.items() if self._may_use(tenant, entry)]
        if not known and tenant is not None:
            known = [one for one in tenant.models if self._named(one) is not None]
        found = self._named(check_model(name, known))
        assert found is not None
        return found

    def _may_use(self, tenant: Tenant | None, entry: ModelEntry) -> bool:
        """Whether a tenant, which the gateway itself is without one, may use a model or an adapter. Tenants' files may
        have a model's alias for its name."""
        if tenant is None or tenant.may_use(entry.name):
            return True
        return entry.adapter is None and self._by_name.get(entry.alias) is entry and tenant.may_use(entry.alias)

    def _named(self, name: str) -> ModelEntry | None:
        entry = self._by_name.get(name)
        if entry is None and self.adapters is not None and (adapter := self.adapters.find(name)) is not None:
            return replace(self._models[adapter.parent], adapter=adapter)
        return entry

    async def tokenize(
        self, request: GenerateRequest, tenant: Tenant | None = None, *, bare: bool = False
    ) -> tuple[int, ...]:
        """The ids of a prompt as they would be computed; ``bare`` leaves out special tokens that are added to a text.
        Counts as a request. Raises InvalidRequest and Overloaded."""
        model, tenant = await self.find_entry(request.model, tenant), self._known(tenant)
        await self._check(request, model, tenant)
        async with self._counted(tenant):
            return (await self._tokenize(request, model, tenant, bare=bare))[0]

    async def prompt_ids(self, request: GenerateRequest, entry: ModelEntry, tenant: Tenant) -> tuple[int, ...]:
        """The ids of a prompt, for a request that has been checked and counted already. Raises InvalidRequest and
        Overloaded."""
        return (await self._tokenize(request, entry, tenant))[0]

    async def detokenize(self, name: str, token_ids: tuple[int, ...], tenant: Tenant | None = None) -> str:
        """The text of ids, special tokens skipped; counts as a request. Raises InvalidRequest, naming ``tokens``, and
        Overloaded."""
        tenant = self._known(tenant)
        check_ids("tokens", token_ids, self.entry(name, tenant).limits)
        async with self._counted(tenant):
            return await self.text_of(name, token_ids, tenant)

    @contextlib.asynccontextmanager
    async def _counted(self, tenant: Tenant) -> AsyncIterator[None]:
        """Holds a place for a request whose prompt is not computed, and counts it. Raises Overloaded."""
        permit = self.admission.enter(tenant)
        try:
            now = time.monotonic()
            self.quotas.take_request(tenant, now)
            await self.quotas.confirm(tenant, None, now)
            yield
        finally:
            self.admission.leave(permit)

    async def text_of(self, name: str, token_ids: tuple[int, ...], tenant: Tenant) -> str:
        """The text of ids, for a request that has been counted already."""
        size_bytes = TOKEN_BYTES * len(token_ids)
        return await self._pool.run(self.entry(name).tokenizer.decode, token_ids, tenant=tenant, size_bytes=size_bytes)

    def models(self, tenant: Tenant | None = None) -> tuple[ModelInfo, ...]:
        """The models that live workers serve now, each with its alias, then their adapters, as far as a tenant may use
        them. An alias that is the path of a folder is the operator's business, and not told."""
        served = {name: entry for name, entry in sorted(self._models.items()) if not self.missing(name)}
        entries = list(served.values())
        for adapter in () if self.adapters is None else self.adapters.all():
            if adapter.parent in served:
                entries.append(replace(served[adapter.parent], adapter=adapter))
        found: list[ModelInfo] = []
        for entry in entries:
            if self._may_use(tenant, entry):
                found.append(_described(entry))
                if self._by_name.get(entry.alias) is entry and not entry.alias.startswith(("/", ".", "~")):
                    found.append(replace(found[-1], name=entry.alias, alias_of=entry.name))
        return tuple(found)

    async def load_adapter(
        self, tenant: Tenant | None, name: str, path: str, *, in_place: bool = False, model: str = ""
    ) -> ModelInfo:
        """Gives a name to the adapter of a folder (AdapterNames.load). Raises PermissionDenied for a tenant that is no
        operator, and where there are no adapters."""
        adapter = await self._adapters_of(tenant).load(name, path, in_place=in_place, model=model)
        assert self.adapter_spread is not None
        # So that the first request finds it everywhere; what takes longer is begun again in the background.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SPREAD_TIMEOUT_S):
                await self.adapter_spread.spread()
        return _described(replace(self._models[adapter.parent], adapter=adapter))

    async def unload_adapter(self, tenant: Tenant | None, name: str) -> None:
        """Takes a name away (AdapterNames.unload). Raises PermissionDenied as :meth:`load_adapter` does."""
        await self._adapters_of(tenant).unload(name)

    def _adapters_of(self, tenant: Tenant | None) -> AdapterNames:
        self.operators_only(tenant)
        if self.adapters is None:
            raise PermissionDenied("this gateway serves no adapters: --enable-lora changes that")
        return self.adapters

    def missing(self, name: str) -> str:
        """What keeps a model from being served, in words; empty where it is served."""
        try:
            served = self.cluster.served(name, self._models[name].fingerprint)
        except Unavailable as error:
            return error.message
        if self.cluster.lacks_node(served):
            return f"no KV node lives for the decode workers of model {name!r}{self.cluster.blind_spot()}"
        return ""

    def not_ready(self) -> str:
        """Why no request could be served now; empty when one could."""
        if self._draining:
            return STOPPING
        missing = [self.missing(name) for name in self._models]
        return "" if "" in missing else "; ".join(missing)

    def metrics(self, tenant: Tenant | None = None) -> Values:
        """This gateway's metrics. Raises PermissionDenied for a tenant that is no operator."""
        self.operators_only(tenant)
        return self.meters.collect()

    def status(self, tenant: Tenant | None = None) -> ClusterStatus:
        """The cluster for ``pillion status``, with totals of all gateways. Raises PermissionDenied for a tenant that is
        no operator."""
        self.operators_only(tenant)
        others = self.cluster.other_gateways()
        totals: list[Usage | ComponentRecord] = [self.totals, *others]
        return ClusterStatus(
            version=VERSION,
            components=tuple(record.status() for record in self.cluster.view.aged(time.monotonic())),
            active_requests=self.admission.requests + sum(one.running_requests for one in others),
            prompt_tokens=sum(one.prompt_tokens for one in totals),
            cached_tokens=sum(one.cached_tokens for one in totals),
            completion_tokens=sum(one.completion_tokens for one in totals),
            index_available=self.cluster.index.available,
        )

    @property
    def active_requests(self) -> int:
        """Requests under way; each answer counts."""
        return self.admission.requests

    def drain(self) -> None:
        """Says from now on that it is not ready. What still comes, over connections that were open before, is served:
        the ports take no more."""
        self._draining = True

    async def aclose(self) -> None:
        """Ends tokenizing and reports quotas. Readers of generations cancel these themselves."""
        self._pool.close()
        await self.quotas.aclose()
        if self.adapters is not None:
            await self.adapters.aclose()
        for entry in self._models.values():
            await entry.template.aclose()
            await entry.grammars.aclose()

    def _known(self, tenant: Tenant | None) -> Tenant:
        if tenant is None and self._ring is not None:
            raise Unauthenticated("an API key is needed")
        return tenant or OPEN

    def operators_only(self, tenant: Tenant | None) -> None:
        """Raises PermissionDenied for a tenant that is no operator, Unauthenticated for nobody."""
        if not self._known(tenant).operator:
            raise PermissionDenied(
                "only a tenant with operator = true may do this: pillion keys add FILE --tenant NAME --operator"
            )

    def _slots(self, model: str) -> int:
        """Answers that the model's workers are given at once; 0 while no bound is known."""
        return self._options.max_running_requests or self.cluster.request_slots(model)

    async def _tokenize(
        self, request: GenerateRequest, model: ModelEntry, tenant: Tenant, *, bare: bool = False
    ) -> tuple[tuple[int, ...], str]:
        """The prompt's ids and its text; that of ids is ""."""
        prompt, field, tokenizer = request.token_ids, prompt_field(request), model.tokenizer
        text = request.text
        if not prompt:
            encode: Callable[[str, int], tuple[int, ...]] = tokenizer.encode_bare if bare else tokenizer.encode_text
            if request.messages:
                tools = request.tools.tools if asks_for_calls(request.tools) else ()
                async with self._boxes.of(tenant):
                    text = await model.template.render(request.messages, request.chat, tools)
                encode = tokenizer.encode_chat
            most = model.limits.max_prompt_tokens
            try:
                prompt = await self._pool.run(encode, text, most, tenant=tenant, size_bytes=len(text))
            except TextTooLong as error:
                raise too_long(str(error), field, model.limits) from None
        check_length(len(prompt), field, model.limits)
        return prompt, text

    async def _grammar(
        self, request: GenerateRequest, model: ModelEntry, form: AnswerForm | None, tenant: Tenant
    ) -> JoinedGrammar | None:
        """The grammar that every answer follows; None where it is free. Raises InvalidRequest, Overloaded and
        Unavailable."""
        shape, tools = request.sampling.structured_outputs, request.tools
        if shape is None and (form is None or form.tools is None):
            return None
        if shape is not None:
            async with self._boxes.of(tenant):
                shape = await model.grammars.lark(shape)

        def write(loose: bool) -> JoinedGrammar:
            check_wanted()
            piece = None if shape is None else shape_piece(shape)
            return join(answer_pieces(form, model.formats, tools, piece, loose))

        # A tool without "strict" whose schema cannot be followed may be called with any object.
        optional = form is not None and any(tool.strict is None for tool in tools.tools)
        for loose in (False, True) if optional else (False,):
            try:
                grammar = await self.off_loop(tenant, shape_bytes(shape) + tools_bytes(tools), write, loose)
                async with self._boxes.of(tenant):
                    await model.grammars.check(grammar)
            except InvalidRequest:
                if loose or not optional:
                    raise
            else:
                return grammar
        raise AssertionError("the last grammar is good, or is refused")

    async def _turn(
        self, permit: AdmissionPermit, model: str, priority: int, arrived: float, deadline: float | None
    ) -> None:
        """Waits until a weighed request may go to the workers. Raises Overloaded and DeadlineExceeded."""
        tenant = permit.tenant
        await self.quotas.confirm(tenant, permit.tokens, time.monotonic())
        try:
            await self.admission.turn(permit, model, tenant.capped(priority), arrived, deadline)
        except BaseException:
            self.quotas.spend(tenant, -permit.tokens, time.monotonic())
            raise

    def _longest(self, request: GenerateRequest, model: ModelEntry, prompt: tuple[int, ...]) -> int:
        """The longest prompt and answer, in tokens, that model and pools allow. Raises InvalidRequest."""
        name, asked, most = model.limits.name, request.sampling.max_tokens, model.limits.max_model_len_tokens
        pools = self.cluster.pools_tokens(name)
        # Nothing is refused for the largest pool while the size of one is unknown.
        largest = max(pools, default=None) if all(pools) else None
        longest = check_pool(len(prompt), prompt_field(request), most, largest)
        common = min(filter(None, pools), default=most)
        # Where every node can hold the request, another one can go on whichever is lost.
        return min(longest, common) if asked is None and len(prompt) < common else longest

    def _job(
        self,
        request: GenerateRequest,
        model: ModelEntry,
        prompt: tuple[int, ...],
        longest: int,
        tenant: Tenant,
        arrived: float,
        deadline: float | None,
    ) -> Job:
        options, asked, resume = self._options, request.sampling, request.resume
        seed = secrets.randbits(63) if resume is None else resume.origin.seed
        bounds = replace(model.limits, max_model_len_tokens=longest)
        self._arrivals += 1
        return Job(
            request_id=request.request_id or f"req-{secrets.token_hex(12)}",
            model=model.limits.name,
            fingerprint=model.fingerprint,
            prompt=prompt,
            resolved=resolve(asked, len(prompt), model.eos_token_ids, bounds, seed, model.sampling),
            # Without prefix caching the salt is used once: blocks of other requests do not match, its own still do.
            cache_salt=cache_salt(tenant, request.cache_salt) if options.prefix_caching else secrets.token_hex(16),
            options=options,
            arrived=arrived,
            deadline=deadline,
            spread=self._arrivals,
            priority=tenant.capped(request.priority),
            background=tenant.background,
            answers=asked.n or 1,
            show_logprobs=asked.logprobs is not None,
            resume=resume,
            original_tokens=model.limits.original_tokens,
            adapter="" if model.adapter is None else model.adapter.digest,
            adapter_rank=0 if model.adapter is None else model.adapter.rank,
        )

    async def _answers(
        self, request: GenerateRequest, model: ModelEntry, job: Job, form: AnswerForm | None, tenant: Tenant
    ) -> list[AnswerText]:
        """The text of each answer, as far as a resumed stream has brought it. Raises InvalidRequest, Conflict, and
        Overloaded."""
        stop_ids, min_tokens = frozenset(job.resolved.stop_token_ids), job.resolved.sampling.min_tokens or 0
        stops = stop_strings(request.sampling.stop)

        def new_answer(index: int) -> AnswerText:
            detokenizer = model.tokenizer.detokenizer()
            if form is None:
                return AnswerText(detokenizer, stops, stop_ids, min_tokens)
            parts = AnswerParts(job.request_id, index, form.tools is not None and form.tools.short_ids)
            return ReadAnswerText(detokenizer, stops, stop_ids, min_tokens, form, parts)

        answers = [new_answer(index) for index in range(_generated(request.sampling))]
        if job.resume is not None:
            check_origin(job.resume, job.digest(), len(job.prompt), request.model or model.name)
            for answer, so_far in zip(answers, job.resume.answers, strict=True):
                if so_far.finish_reason is None or form is not None:
                    # The client has this text; what counts is what the answer still holds back, and how much of it was
                    # reasoning. It may be long, so it is read on a thread, in the tenant's turn.
                    size_bytes = TOKEN_BYTES * len(so_far.token_ids)
                    await self._pool.run(answer.push, so_far.token_ids, tenant=tenant, size_bytes=size_bytes)
        return answers

    def _start(
        self,
        request: GenerateRequest,
        name: str,
        job: Job,
        answers: list[AnswerText],
        permit: AdmissionPermit,
        span: trace.Span,
    ) -> Generation:
        describe_span(span, job, is_chat=bool(request.messages))
        # Nobody waits for a request in the background, so its time in the line is no latency.
        began = time.monotonic() if permit.tenant.background else job.arrived
        meter = RequestMeter(self.meters, job.model, CHAT if request.messages else TEXT, began, permit.answers)

        def ended(usage: Usage) -> None:
            generated = usage.completion_tokens - job.resumed_tokens
            # A prompt that nobody could serve costs its tenant nothing. What a lost gateway has given costs here: the
            # price of an answer is taken at its end, which that gateway has not seen.
            lost = generation.failed_unserved and generated <= 0
            spent = -permit.tokens if lost else usage.completion_tokens
            self.quotas.spend(permit.tenant, spent, time.monotonic())
            self.admission.leave(permit, max(0, generated))
            self.totals += usage
            if not job.background:
                self.cluster.forecaster.answered(job.model, GivenAnswer(len(job.prompt), generated, permit.answers))
            if job.adapter:
                self._running_adapters[name] -= 1

        if job.adapter:
            self._running_adapters[name] += 1
        generation = Generation(job, self.cluster, answers, span, meter, ended)
        generation.start()
        return generation


def _described(entry: ModelEntry) -> ModelInfo:
    adapter = entry.adapter
    return ModelInfo(
        entry.name,
        entry.limits.max_model_len_tokens,
        entry.fingerprint,
        entry.formats.tool_parser,
        entry.formats.reasoning_parser,
        "" if adapter is None else adapter.parent,
        "" if adapter is None else adapter.digest,
        entry.weights,
        sampling=joined(entry.sampling, NEUTRAL),
    )


def _generated(sampling: SamplingParams) -> int:
    """Answers that are generated, of which the best ``n`` are given."""
    return sampling.best_of or sampling.n or 1
