"""The gateway behind the HTTP and gRPC ports: checks, tokenizes, admits and runs requests. Independent of client
protocols.

generate: check fields -> enter (limits) -> quota of requests -> tokenize -> weigh (prompt tokens) -> quota of tokens
  -> turn -> RequestRunner.start
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace

from pillion._version import VERSION
from pillion.errors import (
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    PillionError,
    Unauthenticated,
    Unavailable,
)
from pillion.gateway.adapters.adapter_names import AdapterNames
from pillion.gateway.adapters.name_table import NamedAdapter
from pillion.gateway.admission.admission import RETRY_AFTER_MS, Admission, TenantSlots
from pillion.gateway.admission.api_keys import Keyring
from pillion.gateway.admission.quotas import CountedCall, Quotas
from pillion.gateway.admission.tenants import OPEN, Tenant, cache_salt, flow_of, share_of
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.gateway.formats.answer_reader import OutputFormat
from pillion.gateway.formats.model_formats import ModelFormats
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.gateway.grammars.request_grammars import GrammarMaker, TenantTurns
from pillion.gateway.links.cluster import Cluster
from pillion.gateway.planning.forced_plan import ForcedPlan
from pillion.gateway.read_ahead.read_ahead import ReadAhead
from pillion.gateway.recorder.recorder import Recorder
from pillion.gateway.recorder.story import Story
from pillion.gateway.request.admitted_request import (
    NO_GRAMMAR,
    AdmittedRequest,
    GatewayOptions,
    RequestGrammar,
)
from pillion.gateway.request.refusals import Refusals
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.request.request_telemetry import (
    RequestMeter,
    TenantSums,
    begin_span,
    count_refused,
    describe_span,
    down_readings,
    end_refused_span,
    model_readings,
    operation_of,
    readings,
    version_readings,
)
from pillion.gateway.request.validation import (
    MAX_CUT_TOKENS,
    MAX_WAITING_BYTES,
    ModelLimits,
    check_ids,
    check_length,
    check_model,
    check_origin,
    check_pool,
    check_request,
    check_scores,
    kept_tokens,
    new_answer_id,
    not_embedded,
    prompt_field,
    request_label,
    resolve,
    too_long,
    tools_bytes,
    weight,
)
from pillion.gateway.tokens.answer_text import AnswerText, NoText, StopRules, stop_strings
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.client_marks import BREAKER
from pillion.gateway.tokens.tokenizer import (
    LOOP_BYTES,
    TOKEN_BYTES,
    ModelTokenizer,
    TextTooLong,
    TokenizerPool,
)
from pillion.observability import telemetry
from pillion.observability.metrics import Meters, Reading, Values
from pillion.rules.priority import queue_order
from pillion.settings.sampling_defaults import NEUTRAL, NO_DEFAULTS, joined
from pillion.tasks import at_most
from pillion.types import (
    AnswerSoFar,
    ClusterStatus,
    GenerateRequest,
    ModelInfo,
    PoolingParams,
    SamplingParams,
    TenantUsage,
    Usage,
)
from pillion.wire.registry import DOWN, ComponentRecord

T = TypeVar("T")
# Returns the token counts of a prompt after which other prompts may diverge from it.
BranchPointsOf = Callable[[tuple[int, ...]], Awaitable[tuple[int, ...]]]

# Texts up to this length are encoded on the event loop, in under a millisecond.
SHORT_TEXT_CHARS = 1024
# Bytes charged per bad word, besides its length, for encoding it off the loop.
BAD_WORD_OVERHEAD_BYTES = 64

# Max wait until all machines have a new adapter's files.
SPREAD_TIMEOUT_S = 30.0
# Jobs per tenant in the queue of a shared sandbox process, e.g. for chat templates: one running and one ready.
TENANT_SANDBOX_JOBS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model or adapter that clients can name, with what the gateway needs to tokenize for it.

    ``aliases`` are additional names that clients may use; ``sampling`` has the defaults of unset fields; ``grammars``
    is None if structured outputs are ignored; ``folder`` contains config.json; ``adapter`` is None for the model
    itself.
    """

    limits: ModelLimits
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    tokenizer: ModelTokenizer
    template: ChatTemplate
    formats: ModelFormats = field(default_factory=ModelFormats)
    grammars: GrammarMaker | None = None
    aliases: tuple[str, ...] = ()
    weights: str = ""
    folder: Path | None = None
    adapter: NamedAdapter | None = None
    sampling: SamplingParams = NO_DEFAULTS

    @property
    def name(self) -> str:
        """Name in answers: the adapter's if there is one, else the model's."""
        return self.limits.name if self.adapter is None else self.adapter.name


class Gateway:
    """Serves the requests of all clients, from both ports.

    Args:
        models: by served name.
        ring: API keys; None serves every client without a key.
        quotas: quotas of tenants; by default counted by this gateway alone.
        adapters: names of adapters; None without --enable-lora.
        read_ahead: has KV nodes fetch blocks from lower tiers for queued requests; None for no read-ahead.
        recorder: records requests, for bundles; None without --record-path.
    """

    def __init__(
        self,
        models: Mapping[str, ModelEntry],
        cluster: Cluster,
        options: GatewayOptions,
        ring: Keyring | None = None,
        quotas: Quotas | None = None,
        adapters: AdapterNames | None = None,
        read_ahead: ReadAhead | None = None,
        recorder: Recorder | None = None,
        limits: GatewayLimits = GatewayLimits(),  # noqa: B008  (frozen)
    ) -> None:
        self._models = models
        self._read_ahead, self._recorder = read_ahead, recorder
        self.limits = limits
        self.adapters = adapters
        # A served name takes precedence over another model's alias.
        self._by_name = {alias: entry for entry in models.values() for alias in entry.aliases} | dict(models)
        self.cluster = cluster
        self._options = options
        self._ring = ring
        self.quotas = quotas or Quotas()
        self.admission = Admission(
            options.max_inflight_requests, options.max_inflight_tokens, self._slots, cluster.decode_fleet
        )
        self._pool = TokenizerPool()
        self._sandbox_slots = TenantSlots(TENANT_SANDBOX_JOBS)
        # By tenant: bytes of requests that are processed on a thread or wait for one.
        self._waiting_bytes: Counter[str] = Counter()
        self._draining = False
        self._arrivals = secrets.randbelow(1024)
        self.meters = Meters()
        admission, registry = self.admission, cluster.registry
        self.meters.watch(
            lambda: readings(admission.requests, admission.waiting, cluster.index_available, not registry.refusal)
        )
        self.meters.watch(self._model_readings)
        self.meters.watch(lambda: down_readings(cluster.view.of(DOWN)))
        self.meters.watch(lambda: version_readings(cluster.view.versions()))
        if adapters is not None:
            self.meters.watch(adapters.readings)
        if recorder is not None:
            self.meters.watch(recorder.readings)
        self.refusals = Refusals()
        # Tokens of all requests that have ended.
        self.totals = Usage(0, 0, 0)
        self.tenants = TenantSums()
        self.meters.watch(self.tenants.readings)

    def tenant_of(self, authorization: str) -> Tenant:
        """Return the tenant of an Authorization header; count a refusal. Raises Unauthenticated."""
        try:
            return self.find_tenant(authorization)
        except Unauthenticated as error:
            count_refused(self.meters, error)
            raise

    def find_tenant(self, authorization: str) -> Tenant:
        """Return the tenant of a call without counting a refusal. Raises Unauthenticated."""
        return OPEN if self._ring is None else self._ring.tenant_of(authorization)

    def tenant_named(self, name: str) -> Tenant | None:
        """Return the tenant of this name, for work that outlives its call; None if its key was removed."""
        if self._ring is None:
            return None if name else OPEN
        return self._ring.tenants.get(name)

    @property
    def needs_keys(self) -> bool:
        """True if every call needs an API key."""
        return self._ring is not None

    @property
    def caches_prefixes(self) -> bool:
        """True if requests may reuse KV of other requests."""
        return self._options.prefix_caching

    def replace_keys(self, ring: Keyring) -> None:
        """Replace the API keys. Running requests continue, and spent quota stays spent."""
        self._ring = ring
        self.quotas.retain(ring.tenants)
        self.admission.retain(ring.tenants)
        self._sandbox_slots.retain(ring.tenants)
        self._pool.retain(ring.tenants)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
        entry: ModelEntry | None = None,
        counted: CountedCall | None = None,
        pooling: PoolingParams | None = None,
        branch_points: BranchPointsOf | None = None,
        streamed: bool = True,
        recorded: bool = False,
        plan: ForcedPlan | None = None,
    ) -> RequestRunner:
        """Start a request, which the caller reads or cancels.

        Args:
            request: as the client sent it.
            tenant: sender, from :meth:`tenant_of`; None only if no keys are needed.
            timeout_s: the client's timeout, None for no limit.
            parent: the client's trace context.
            entry: the requested model, if its name was resolved when the client's call arrived; None resolves it now.
            counted: quota already charged by :meth:`counted`; None charges the request here.
            pooling: how the text becomes a vector; None for a request that generates.
            branch_points: called with the prompt of a model with states.
            streamed: True if the client requested a stream; for the trace.
            recorded: True if the client requested a bundle.
            plan: an operator's constraints on the plan; None for none.

        Raises:
            NotFound: no such model. InvalidRequest: names every wrong field. Unauthenticated: no ``tenant``.
            Overloaded: a limit or quota is reached, or the wait exceeds ``timeout_s``. DeadlineExceeded: no time left.
        """
        tenant = self._require_tenant(tenant)
        arrived = time.monotonic()
        deadline = None if timeout_s is None else arrived + timeout_s
        span = begin_span(request, parent, streamed=streamed)
        permit: AdmissionPermit | None = None
        quota = counted or (CountedCall(self.quotas, tenant) if tenant.has_quotas else None)
        try:
            model = entry or await self.find_entry(request.model, tenant)
            await self._check(request, model, tenant)
            field = "sampling.best_of" if request.sampling.best_of else "sampling.n"
            order = queue_order(tenant.capped(request.priority), arrived)
            permit = self.admission.enter(tenant, _answers_to_generate(request.sampling), field, order)
            # Quota after limits, so that a request over a limit uses none.
            if counted is None and quota is not None:
                quota.take(1, arrived)
            admitted, answers = await self._prepare(
                request, model, permit, arrived, deadline, pooling, branch_points, span
            )
            if plan is not None:
                policy = plan.policy or self._options.policy
                admitted = replace(admitted, options=replace(self._options, policy=policy, node_id=plan.node_id))
            with telemetry.child("admission", span):
                story = await self._wait_turn(permit, admitted, quota, recorded)
            return self._start(model.name, admitted, answers, permit, quota, span, story)
        except BaseException as error:
            self._leave(tenant, permit, quota if counted is None else None, error)
            end_refused_span(span, error)
            raise

    async def _prepare(
        self,
        request: GenerateRequest,
        model: ModelEntry,
        permit: AdmissionPermit,
        arrived: float,
        deadline: float | None,
        pooling: PoolingParams | None,
        branch_points: BranchPointsOf | None,
        span: trace.Span,
    ) -> tuple[AdmittedRequest, list[AnswerText]]:
        """Tokenize a request's prompt, check what depends on it, and return the request for the workers and the texts
        of its answers: empty, or those of a resumed stream. Raises what :meth:`generate` does."""
        tenant, options, resume = permit.tenant, self._options, request.resume
        with telemetry.child("tokenize", span) as tokenizing:
            prompt, text = await self._tokenize(request, model, tenant)
            tokenizing.set_attribute("pillion.prompt_tokens", len(prompt))
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the request's deadline passed while it was tokenized")
        bounds = replace(model.limits, max_model_len_tokens=self._longest(request, model, prompt))
        schemas = tools_bytes(request.tools) if request.tools.asks_for_calls else 0
        output_format = await self.off_loop(tenant, schemas, model.formats.output_format, request, text)
        scores = 0 if request.sampling.prompt_logprobs is None else check_scores(request.sampling, len(prompt))
        grammar = await self._grammar(request, model, output_format, tenant)
        self.admission.weigh(permit, len(prompt), scores)
        seed = secrets.randbits(63) if resume is None else resume.origin.seed
        sampling, recommended = resolve(
            request.sampling, len(prompt), model.eos_token_ids, bounds, seed, model.sampling
        )
        self._arrivals += 1
        admitted = AdmittedRequest(
            asked=request,
            request_id=request_label(request.request_id),
            # Streams of older gateways have no answer id: their tool calls have the request's id.
            answer_id=new_answer_id() if resume is None else resume.origin.answer_id or request.request_id,
            model=model.limits.name,
            fingerprint=model.fingerprint,
            prompt=prompt,
            sampling=sampling,
            recommended=recommended,
            # Without prefix caching every request has a random salt, so its blocks match no other's.
            cache_salt=cache_salt(tenant, request.cache_salt) if options.prefix_caching else secrets.token_hex(16),
            options=options,
            arrived=arrived,
            deadline=deadline,
            spread=self._arrivals,
            priority=tenant.capped(request.priority),
            background=tenant.background,
            grammar=grammar,
            original_tokens=model.limits.original_tokens,
            adapter="" if model.adapter is None else model.adapter.digest,
            adapter_rank=0 if model.adapter is None else model.adapter.rank,
            pooling=pooling,
            flow=flow_of(tenant, model.fingerprint),
        )
        if request.sampling.bad_words:
            admitted = await self._with_bad_words(admitted, model, tenant)
        if branch_points is not None and self.cluster.keeps_states(admitted.model):
            admitted = replace(admitted, kept_tokens=await branch_points(prompt))
        return admitted, await self._answers(model, admitted, output_format, tenant)

    def _leave(
        self, tenant: Tenant, permit: AdmissionPermit | None, quota: CountedCall | None, error: BaseException
    ) -> None:
        """Remove a request that failed before its start. ``quota`` is what it charged itself, None for nothing."""
        if quota is not None:
            quota.end(time.monotonic(), error)
        if permit is not None:
            self.admission.leave(permit)
        self._count_refused(tenant, error)

    def _count_refused(self, tenant: Tenant, error: BaseException) -> None:
        # A batch retries its refused requests, so no client sees the refusal.
        if isinstance(error, PillionError) and not (tenant.background and isinstance(error, Overloaded)):
            count_refused(self.meters, error)

    async def check(self, request: GenerateRequest, tenant: Tenant | None) -> None:
        """Check all fields of a request except the length of its text. Raises NotFound, and InvalidRequest that lists
        every wrong field."""
        await self._check(request, await self.find_entry(request.model, tenant), tenant)

    async def _check(self, request: GenerateRequest, model: ModelEntry, tenant: Tenant | None) -> None:
        model.formats.check(request.tools)
        await self.off_loop(tenant, weight(request), check_request, request, model.limits)

    async def off_loop(self, tenant: Tenant | None, size_bytes: int, job: Callable[..., T], *arguments: Any) -> T:
        """Run ``job(*arguments)``, which processes ``size_bytes``: above LOOP_BYTES on a thread, else on the event
        loop. Raises what the job raises, and Overloaded if too many bytes wait for threads."""
        if size_bytes <= LOOP_BYTES:
            return job(*arguments)
        return await self._on_thread_limited(self._require_tenant(tenant), size_bytes, job, *arguments)

    async def _on_thread_limited(self, tenant: Tenant, size_bytes: int, job: Callable[..., T], *arguments: Any) -> T:
        """Run a job as :meth:`on_thread` does, within the tenant's share of MAX_WAITING_BYTES. Raises Overloaded above
        it."""
        waiting, own = self._waiting_bytes.total(), self._waiting_bytes[tenant.name]
        limit = share_of(tenant, MAX_WAITING_BYTES, waiting - own)
        if own + size_bytes > limit:
            raise Overloaded(f"more than {limit} bytes of requests wait to be read", RETRY_AFTER_MS)
        self._waiting_bytes[tenant.name] += size_bytes
        try:
            return await self.on_thread(tenant, size_bytes, job, *arguments)
        finally:
            self._waiting_bytes[tenant.name] -= size_bytes
            self._waiting_bytes = +self._waiting_bytes

    @property
    def longest_tokens(self) -> int:
        """Longest context of all models."""
        return max(entry.limits.max_model_len_tokens for entry in self._models.values())

    async def find_entry(self, name: str, tenant: Tenant | None = None) -> ModelEntry:
        """Return the model or adapter of :meth:`entry`, after asking Redis for a name that is unknown here: another
        gateway may have just loaded the adapter. Raises NotFound and InvalidRequest."""
        if self.adapters is not None and name not in self._by_name:
            await self.adapters.look(name)
        return self.entry(name, tenant)

    def entry(self, name: str, tenant: Tenant | None = None) -> ModelEntry:
        """Return the model or adapter of this name, if the tenant (None: the gateway itself) may use it; for "", the
        only model that it may use. Raises NotFound and InvalidRequest."""
        entry = self._find_entry(name)
        return entry if entry is not None and self._may_use(tenant, entry) else self._only_model(name, tenant)

    def _only_model(self, name: str, tenant: Tenant | None) -> ModelEntry:
        """Return the only model that a tenant may use if ``name`` is "". Raises InvalidRequest if there are several,
        and NotFound for any other name."""
        known = [one for one, entry in self._models.items() if self._may_use(tenant, entry)]
        if not known and tenant is not None:
            known = [one for one in tenant.models if self._find_entry(one) is not None]
        adapters = [one.name for one in self._adapters() if tenant is None or tenant.may_use(one.name)]
        entries = [entry for one in known if (entry := self._find_entry(one)) is not None]
        aliases = [alias for entry in entries for alias in self._aliases(entry)]
        chosen = self._find_entry(check_model(name, known, adapters, aliases))
        assert chosen is not None
        return chosen

    def _may_use(self, tenant: Tenant | None, entry: ModelEntry) -> bool:
        """Return whether a tenant (None: the gateway itself) may use a model or adapter. Its models in the keys file
        may be given by aliases."""
        if tenant is None or tenant.may_use(entry.name):
            return True
        return entry.adapter is None and any(map(tenant.may_use, self._aliases(entry)))

    def _aliases(self, entry: ModelEntry) -> list[str]:
        """Return the model's aliases, except those that are another model's served name, which takes precedence."""
        return [alias for alias in entry.aliases if self._by_name.get(alias) is entry]

    def _find_entry(self, name: str) -> ModelEntry | None:
        """Return the model or adapter of this name; None if there is none."""
        entry = self._by_name.get(name)
        if entry is None and self.adapters is not None and (adapter := self.adapters.find(name)) is not None:
            return replace(self._models[adapter.parent], adapter=adapter)
        return entry

    def _adapters(self) -> Sequence[NamedAdapter]:
        """Return the adapters of the models served here, sorted by name."""
        return () if self.adapters is None else self.adapters.all()

    async def tokenize(
        self, request: GenerateRequest, tenant: Tenant | None = None, *, bare: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a request's prompt as workers would get it; ``bare`` omits added special tokens. Counts as
        a request. Raises InvalidRequest and Overloaded."""
        model, tenant = await self.find_entry(request.model, tenant), self._require_tenant(tenant)
        await self._check(request, model, tenant)
        async with self._counted(tenant):
            return (await self._tokenize(request, model, tenant, bare=bare))[0]

    async def prompt_ids(self, request: GenerateRequest, entry: ModelEntry, tenant: Tenant) -> tuple[int, ...]:
        """Return the ids of the prompt of a request that is already checked and counted. Raises InvalidRequest and
        Overloaded."""
        return (await self._tokenize(request, entry, tenant))[0]

    async def on_thread(self, tenant: Tenant, size_bytes: int, job: Callable[..., T], *arguments: Any) -> T:
        """Run ``job(*arguments)``, which processes ``size_bytes``, on a thread, scheduled fairly between tenants.
        Raises what the job raises, and Overloaded."""
        return await self._pool.run(job, *arguments, tenant=tenant, size_bytes=size_bytes)

    async def detokenize(self, name: str, token_ids: tuple[int, ...], tenant: Tenant | None = None) -> str:
        """Return the text of token ids, without special tokens. Counts as a request. Raises InvalidRequest, which names
        the field "tokens", and Overloaded."""
        tenant = self._require_tenant(tenant)
        check_ids("tokens", token_ids, self.entry(name, tenant).limits)
        async with self._counted(tenant):
            return await self.text_of(name, token_ids, tenant)

    @contextlib.asynccontextmanager
    async def _counted(self, tenant: Tenant) -> AsyncIterator[None]:
        """Count a call that tokenizes but computes no prompt, in admission and as a request. Raises Overloaded."""
        permit = self.admission.enter(tenant)
        try:
            async with self.counted(tenant, [""], None):
                yield
        finally:
            self.admission.leave(permit)

    @contextlib.asynccontextmanager
    async def counted(
        self, tenant: Tenant | None, names: Sequence[str], tokens: int | None
    ) -> AsyncIterator[CountedCall]:
        """Charge the quotas with all prompts of a call before any of them runs; refund the unused part if the block
        raises.

        Args:
            tenant: the sender.
            names: field of each prompt; each prompt counts as a request.
            tokens: tokens of all prompts; None if none is computed.

        Raises:
            Overloaded: a quota is reached. InvalidRequest: more prompts than the quota per minute; names the field of
            the first prompt above it.
        """
        tenant, now = self._require_tenant(tenant), time.monotonic()
        limit = tenant.requests_per_minute
        if limit and len(names) > limit:
            text = f"the call has {len(names)} prompts; requests_per_minute of tenant {tenant.name!r} is {limit}"
            raise InvalidRequest.of(FieldViolation(names[limit], f"{text}, and each prompt counts"))
        quota = CountedCall(self.quotas, tenant)
        try:
            quota.take(len(names), now)
            await quota.confirm(tokens, now)
        except Overloaded as error:
            self._count_refused(tenant, error)
            raise
        try:
            yield quota
        except BaseException as error:
            quota.end(time.monotonic(), error)
            raise

    async def text_of(self, name: str, token_ids: tuple[int, ...], tenant: Tenant) -> str:
        """Return the text of token ids, without special tokens, for a request that is already counted."""
        size_bytes = TOKEN_BYTES * len(token_ids)
        return await self.on_thread(tenant, size_bytes, self.entry(name).tokenizer.decode, token_ids)

    def models(self, tenant: Tenant | None = None) -> tuple[ModelInfo, ...]:
        """Return the models that live workers serve, each followed by its aliases, then their adapters, all as far as
        the tenant may use them. Aliases that are paths are omitted, since they are private to the operator."""
        served = {name: entry for name, entry in sorted(self._models.items()) if not self.missing(name)}
        entries = list(served.values())
        for adapter in self._adapters():
            if adapter.parent in served:
                entries.append(replace(served[adapter.parent], adapter=adapter))
        infos: list[ModelInfo] = []
        for entry in entries:
            if self._may_use(tenant, entry):
                infos.append(_model_info(entry))
                infos += [
                    replace(infos[-1], name=alias, alias_of=entry.name)
                    for alias in self._aliases(entry)
                    if not alias.startswith(("/", ".", "~"))
                ]
        return tuple(infos)

    async def load_adapter(
        self, tenant: Tenant | None, name: str, path: str, *, in_place: bool = False, model: str = ""
    ) -> ModelInfo:
        """Load the adapter in the folder ``path`` under a name (AdapterNames.load). Raises PermissionDenied for tenants
        other than operators, and without --enable-lora."""
        adapters = self._names_for_operator(tenant)
        adapter = await adapters.load(name, path, in_place=in_place, model=model)
        # Machines that take longer get the files in the background.
        await at_most(SPREAD_TIMEOUT_S, adapters.spread())
        return _model_info(replace(self._models[adapter.parent], adapter=adapter))

    async def unload_adapter(self, tenant: Tenant | None, name: str) -> None:
        """Remove an adapter's name (AdapterNames.unload). Raises PermissionDenied as :meth:`load_adapter` does."""
        await self._names_for_operator(tenant).unload(name)

    def _names_for_operator(self, tenant: Tenant | None) -> AdapterNames:
        """Return the names of adapters, for a tenant that may change them. Raises PermissionDenied."""
        self.operators_only(tenant)
        if self.adapters is None:
            raise PermissionDenied("this gateway serves no adapters: --enable-lora changes that")
        return self.adapters

    def missing(self, name: str) -> str:
        """Return why a model is not served, or ""."""
        try:
            served = self.cluster.served(name, self._models[name].fingerprint)
        except Unavailable as error:
            return error.message
        if self.cluster.lacks_node(served):
            return f"no KV node lives for the decode workers of model {name!r}{self.cluster.blind_spot()}"
        return ""

    def not_ready(self) -> str:
        """Return why no model could be served now, or ""."""
        if self._draining:
            return "this gateway is stopping"
        missing = [self.missing(name) for name in self._models]
        return "" if "" in missing else "; ".join(missing)

    def metrics(self, tenant: Tenant | None = None) -> Values:
        """Return this gateway's metrics. Raises PermissionDenied for tenants other than operators."""
        self.operators_only(tenant)
        return self.meters.collect()

    def _model_readings(self) -> Iterator[Reading]:
        for name in self._models:
            queued, usage = self.cluster.queued_requests(name), self.cluster.kv_usage(name)
            yield from model_readings(name, *self.admission.counts(name), queued, usage)

    def status(self, tenant: Tenant | None = None) -> ClusterStatus:
        """Return the cluster's status, with the totals of all gateways. Raises PermissionDenied for tenants other than
        operators."""
        self.operators_only(tenant)
        others, view = self.cluster.other_gateways(), self.cluster.view
        totals: list[Usage | ComponentRecord] = [self.totals, *others]
        return ClusterStatus(
            version=VERSION,
            components=tuple(record.status() for record in (*view.aged(time.monotonic()), *view.foreign())),
            active_requests=self.admission.requests + sum(one.running_requests for one in others),
            prompt_tokens=sum(one.prompt_tokens for one in totals),
            cached_tokens=sum(one.cached_tokens for one in totals),
            completion_tokens=sum(one.completion_tokens for one in totals),
            index_available=self.cluster.index_available,
            tenants=tuple(TenantUsage(name, usage) for name, usage in sorted(self.tenants.of.items())),
        )

    @property
    def active_requests(self) -> int:
        """Number of requests in the gateway; each answer counts."""
        return self.admission.requests

    def drain(self) -> None:
        """Report "not ready" from now on. Open connections are still served; the ports accept no new ones."""
        self._draining = True

    async def warm_up(self) -> None:
        """Start the grammar checkers, before the first request that needs one."""
        for entry in self._models.values():
            if entry.grammars is not None:
                await entry.grammars.warm_up()

    async def aclose(self) -> None:
        """Stop threads and sandbox processes, and report quotas a last time. Running requests are not cancelled: their
        readers do that."""
        self._pool.close()
        await self.quotas.aclose()
        if self.adapters is not None:
            await self.adapters.aclose()
        for entry in self._models.values():
            await entry.template.aclose()
            if entry.grammars is not None:
                await entry.grammars.aclose()

    def _require_tenant(self, tenant: Tenant | None) -> Tenant:
        """Return the tenant, OPEN for None if no keys are needed. Raises Unauthenticated if they are."""
        if tenant is None and self._ring is not None:
            raise Unauthenticated("an API key is needed")
        return tenant or OPEN

    def operators_only(self, tenant: Tenant | None) -> None:
        """Raise PermissionDenied for tenants other than operators, and Unauthenticated for None."""
        if not self._require_tenant(tenant).operator:
            raise PermissionDenied(
                "only a tenant with operator = true may do this: pillion keys add FILE --tenant NAME --operator"
            )

    def _slots(self, model: str) -> int:
        """Return the max answers that the model's workers run at once; 0 while unknown."""
        return self._options.max_running_requests or self.cluster.request_slots(model)

    async def _tokenize(
        self, request: GenerateRequest, model: ModelEntry, tenant: Tenant, *, bare: bool = False
    ) -> tuple[tuple[int, ...], str]:
        """Return the ids of a request's prompt, truncated if requested, and its text, "" for a prompt of ids. Raises
        InvalidRequest and Overloaded."""
        prompt, field, tokenizer = request.token_ids, prompt_field(request), model.tokenizer
        truncates = request.sampling.truncate_prompt_tokens is not None
        kept = kept_tokens(request.sampling, model.limits) if truncates else None
        text = request.text
        if not prompt:
            encode: Callable[[str, int], tuple[int, ...]] = tokenizer.encode_bare if bare else tokenizer.encode_text
            if request.messages:
                tools = request.tools.tools if request.tools.asks_for_calls else ()
                async with self._sandbox_slots.of(tenant):
                    text = await model.template.render(request.messages, request.chat, tools)
                encode = tokenizer.encode_chat
            max_tokens = model.limits.max_prompt_tokens
            if kept is not None:
                max_tokens = max(max_tokens, MAX_CUT_TOKENS)
            try:
                if len(text) <= SHORT_TEXT_CHARS:
                    prompt, largest = _encode(encode, text, max_tokens)
                else:
                    prompt, largest = await self.on_thread(tenant, len(text), _encode, encode, text, max_tokens)
            except TextTooLong as error:
                context_tokens = model.limits.max_model_len_tokens
                raise too_long(error.tokens, field, context_tokens, exact=error.exact) from None
            if largest >= model.limits.vocab_size:
                raise not_embedded(request, tokenizer.codec.id_to_token(largest) or str(largest), model.limits)
            if request.messages:
                text = text.replace(BREAKER, "")
        if kept is not None:
            prompt = tokenizer.cut_ids(prompt, kept, request.sampling.truncation_side)
        check_length(len(prompt), field, model.limits)
        return prompt, text

    async def _with_bad_words(self, admitted: AdmittedRequest, model: ModelEntry, tenant: Tenant) -> AdmittedRequest:
        """Return the request with the token sequences of its bad words. Raises Overloaded."""
        words, vocab_size = admitted.asked.sampling.bad_words, model.limits.vocab_size
        size_bytes, job = sum(BAD_WORD_OVERHEAD_BYTES + len(word) for word in words), model.tokenizer.bad_sequences
        sequences = await self.off_loop(tenant, size_bytes, job, words, vocab_size)
        return replace(admitted, sampling=replace(admitted.sampling, bad_words_token_ids=sequences))

    async def _grammar(
        self, request: GenerateRequest, model: ModelEntry, output_format: OutputFormat | None, tenant: Tenant
    ) -> RequestGrammar:
        """Return the grammar of all answers. Raises InvalidRequest, Overloaded and Unavailable."""
        if model.grammars is None or (request.sampling.structured_outputs is None and output_format is None):
            return NO_GRAMMAR
        turns = TenantTurns(partial(self.off_loop, tenant), partial(self._sandbox_slots.of, tenant))
        began = time.monotonic()
        grammar = await model.grammars.grammar(request, output_format, turns)
        return grammar._replace(made_s=time.monotonic() - began)

    async def _wait_turn(
        self, permit: AdmissionPermit, admitted: AdmittedRequest, quota: CountedCall | None, recorded: bool
    ) -> Story | None:
        """Charge the prompt's tokens to the quota, unless the caller has, and wait for the request's turn. Return its
        story if there is a recorder. Raises Overloaded and DeadlineExceeded."""
        stop = contextlib.ExitStack()
        if quota is not None and not quota.confirmed:
            await quota.confirm(permit.tokens, time.monotonic())
        story = None if self._recorder is None else self._recorder.begin(admitted, permit, recorded)

        def on_wait() -> None:
            if self._read_ahead is not None:
                stop.callback(self._read_ahead.waits(admitted))
            if story is not None:
                story.waits(time.monotonic(), *self.admission.line(admitted.model))

        with stop:
            # A resumed stream is not refused because its remaining answer may exceed the deadline.
            new = admitted.pooling is None and admitted.resume is None
            allowed = admitted.max_tokens if new else 0
            try:
                await self.admission.turn(permit, admitted.model, admitted.deadline, allowed, on_wait)
            except BaseException as error:
                if story is not None:
                    gone = Cancelled("the client went away while the request waited")
                    story.ended(time.monotonic(), error=error if isinstance(error, PillionError) else gone)
                raise
        if quota is not None:
            quota.begun_tokens += permit.tokens
        if story is not None:
            story.turn(time.monotonic())
        return story

    def _longest(self, request: GenerateRequest, model: ModelEntry, prompt: tuple[int, ...]) -> int:
        """Return the max tokens of prompt and answer that model and pools allow. Raises InvalidRequest."""
        name, asked, context = model.limits.name, request.sampling.max_tokens, model.limits.max_model_len_tokens
        pools = self.cluster.pools_tokens(name)
        # Skip the check against the largest pool while any pool's size is unknown.
        largest = max(pools, default=None) if all(pools) else None
        longest = check_pool(len(prompt), prompt_field(request), context, largest)
        smallest = min(filter(None, pools), default=context)
        # A request that fits into every node's pool can continue on any node after a loss.
        return min(longest, smallest) if asked is None and len(prompt) < smallest else longest

    async def _answers(
        self,
        model: ModelEntry,
        admitted: AdmittedRequest,
        output_format: OutputFormat | None,
        tenant: Tenant,
    ) -> list[AnswerText]:
        """Return the text of each answer: empty, or that of a resumed stream. Raises InvalidRequest, Conflict and
        Overloaded."""
        asked, sampling = admitted.asked.sampling, admitted.sampling
        stop_ids, min_tokens = frozenset(sampling.stop_token_ids), sampling.min_tokens or 0
        stops = StopRules(stop_strings(asked.stop), stop_ids, min_tokens, asked.include_stop_str_in_output)

        def new_answer(index: int) -> AnswerText:
            if asked.detokenize is False:
                return AnswerText(NoText(), stops.strings, stops.ids)
            detokenizer = model.tokenizer.detokenizer(shows_specials=asked.skip_special_tokens is False)
            return model.formats.new_text(output_format, detokenizer, stops, admitted.answer_id, index)

        answers = [new_answer(index) for index in range(_answers_to_generate(asked))]
        if admitted.resume is not None:
            check_origin(admitted.resume, admitted.digest(), len(admitted.prompt), admitted.asked.model or model.name)
            for answer, so_far in zip(answers, admitted.resume.answers, strict=True):
                if so_far.finish_reason is None or output_format is not None:
                    await self._catch_up(answer, so_far, tenant)
        return answers

    async def _catch_up(self, answer: AnswerText, so_far: AnswerSoFar, tenant: Tenant) -> None:
        """Feed the tokens of a resumed answer to its AnswerText, to restore the parser's state and the text held back.
        Runs on a thread, since the answer may be long."""
        size_bytes = TOKEN_BYTES * len(so_far.token_ids)
        await self.on_thread(tenant, size_bytes, answer.push, so_far.token_ids)

    def _start(
        self,
        name: str,
        admitted: AdmittedRequest,
        answers: list[AnswerText],
        permit: AdmissionPermit,
        quota: CountedCall | None,
        span: trace.Span,
        story: Story | None,
    ) -> RequestRunner:
        """Create and start the runner; when it ends, charge its tokens and release its permit."""
        operation = operation_of(admitted)
        if span.is_recording():
            describe_span(span, admitted, operation, name)
        # Latency of background requests excludes the queue: no client waits.
        began = time.monotonic() if permit.tenant.background else admitted.arrived
        meter = RequestMeter(self.meters, admitted.model, operation, began, permit.answers, admitted.max_tokens)
        permit.first_token_s, permit.last_token_s = meter.first_s, meter.last_s

        def ended(usage: Usage) -> None:
            generated = usage.completion_tokens - admitted.resumed_tokens
            # Requests that fail before any token cost nothing. Completion tokens, including those that a lost gateway
            # sent, are charged at the answer's end.
            if quota is not None and runner.failed and generated <= 0:
                quota.begun_tokens -= permit.tokens
                quota.refund(int(runner.refused), permit.tokens, time.monotonic())
            elif quota is not None:
                self.quotas.spend(permit.tenant, usage.completion_tokens, time.monotonic())
            permit.ended_itself = runner.ended_itself
            self.admission.leave(permit, max(0, generated))
            self.totals += usage
            self.tenants.add(permit.tenant.name, usage)
            if self.adapters is not None and admitted.adapter:
                self.adapters.ended(name)

        if self.adapters is not None and admitted.adapter:
            self.adapters.began(name)
        runner = RequestRunner(admitted, self.cluster, answers, span, meter, ended, story)
        runner.start()
        return runner


def _encode(encode: Callable[[str, int], tuple[int, ...]], text: str, max_tokens: int) -> tuple[tuple[int, ...], int]:
    """Return a text's ids, and the largest id. Raises TextTooLong for many more than ``max_tokens``."""
    ids = encode(text, max_tokens)
    return ids, max(ids, default=0)


def _model_info(entry: ModelEntry) -> ModelInfo:
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


def _answers_to_generate(sampling: SamplingParams) -> int:
    """Return the number of answers to generate; the client gets the best ``n``."""
    return sampling.best_of or sampling.n or 1
