"""Vectors or labels of a call's texts, and scores of its pairs, as the checkpoint specifies.

texts --prompt--> TextCall: a request each --> last token's row --truncated, normalized--> vectors
texts --> TextCall --> logits of labels --activated--> probabilities
pairs --formatted for the checkpoint--> TextCall --> rows --> scores
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from opentelemetry import context as otel_context

from pillion.errors import ConfigError, FieldViolation, InvalidRequest
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.pooling.label_forms import LabelForm, read_label_form
from pillion.gateway.pooling.pair_forms import (
    PairForm,
    PairText,
    ScoreKind,
    TextPair,
    cosine,
    is_reranker_name,
    read_pair_form,
)
from pillion.gateway.pooling.pooling_files import Vector, VectorForm, read_vector_form
from pillion.gateway.pooling.pooling_rows import PoolingRows
from pillion.gateway.pooling.text_call import MAX_TEXTS, TextCall, TextRows, as_ids, run_limited
from pillion.types import ChatMessage, ChatOptions, GenerateRequest, Usage

# Max truncations of a text or a pair's document. One may not suffice: a truncated text can tokenize differently.
MAX_CUTS = 4
# Prompts, if the checkpoint has them, before the texts of a pair, as in sentence-transformers' encode_query and
# encode_document.
_QUERY_PROMPT, _DOCUMENT_PROMPT = "query", "document"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """Vectors of texts in order, the token ids of each, the total usage, and the model's name."""

    vectors: list[Vector]
    token_ids: list[tuple[int, ...]]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Scores of pairs in order, the total usage, and the model's name.

    A higher score means a better document: a cosine in [-1, 1], or a probability, depending on the checkpoint.
    """

    scores: list[float]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Results of a classifier for texts in order.

    Attributes:
        values: per text [labels], the probability of each label, or its logit.
        labels: names in the order of the values.
    """

    values: list[Vector]
    labels: tuple[str, ...]
    usage: Usage
    model: str


class GatewayVectors:
    """Vectors and labels of texts, and scores of pairs, as requests of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        # (kind, source) -> form of a model's vectors, labels or scores, or the ConfigError of its files.
        self._forms: dict[tuple[str, Hashable], Any] = {}

    async def embed(
        self,
        requests: Sequence[GenerateRequest],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        cut_tokens: int | None = None,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
        entry: ModelEntry | None = None,
    ) -> EmbeddedTexts:
        """Return the vector of each request's text or token ids; the requests differ in these only.

        Args:
            dimensions: number of leading values of each vector to return; None: all.
            prompt_name: the checkpoint's prompt before each text; None: its default, "": none.
            cut_tokens: number of leading tokens to truncate texts to, with the tokenizer's special tokens;
                CUT_TO_MODEL: the model's limit; None: a text that is too long is refused.
            timeout_s: for all texts together; None for no limit.
            tenant, parent, entry: as in :meth:`Gateway.generate`.

        Raises what Gateway.generate raises, for the first text that fails; the others are cancelled. The field of an
        error starts with ``inputs[n]``. Raises InvalidRequest if the checkpoint's pooling is not supported.
        """
        _check_count(len(requests))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        model = entry or await self._gateway.find_entry(requests[0].model, tenant)
        form = await self._vector_form(model)
        if form.width is not None:
            _check_dimensions(dimensions, form.width)
        prompt = _prompt_of(form, prompt_name)
        pooled = PoolingRows(pooling=form.pooling)
        call = TextCall(self._gateway, model, tenant, _max_tokens(form, model), cut_tokens, deadline, parent, pooled)
        prompted = await run_limited([_request_of(call, form, prompt, one) for one in requests])
        computed = await call.rows(prompted, [f"inputs[{number}]" for number in range(len(prompted))])
        vectors = [_to_vector(row, dimensions, form.normalized) for row in computed.rows]
        return EmbeddedTexts(vectors, computed.token_ids, computed.usage, model.name)

    async def score(
        self,
        pairs: Sequence[TextPair],
        shared: GenerateRequest,
        *,
        instruction: str | None = None,
        cut_tokens: int | None = None,
        document_tokens: int | None = None,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
        entry: ModelEntry | None = None,
    ) -> ScoredPairs:
        """Return the score of each pair, as the checkpoint specifies.

        Args:
            shared: model, salt, priority and id of all requests.
            instruction: a reranker's instruction; None: the checkpoint's.
            cut_tokens: as in :meth:`embed`; if query and document are one text, the document is truncated so that the
                whole fits.
            document_tokens: number of leading tokens to truncate documents to; None: no truncation.

        Other arguments and errors are those of :meth:`embed`; the field of an error starts with ``inputs[n].query`` or
        ``inputs[n].document``, or ``inputs[n]`` for both.
        """
        _check_count(len(pairs))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        model = entry or await self._gateway.find_entry(shared.model, tenant)
        form = (await self._pair_form(model)).with_instruction(instruction)
        vectors = await self._vector_form(model) if form.kind is ScoreKind.COSINE else VectorForm()
        max_tokens = _max_tokens(vectors if form.kind is ScoreKind.COSINE else form, model)
        call = TextCall(self._gateway, model, tenant, max_tokens, cut_tokens, deadline, parent)
        if document_tokens is not None:
            documents = await run_limited([_first_tokens(call, pair.document, document_tokens) for pair in pairs])
            pairs = [replace(pair, document=document) for pair, document in zip(pairs, documents, strict=True)]
        if form.kind is ScoreKind.COSINE:
            call.pooled = PoolingRows(pooling=vectors.pooling)
            scores, computed = await _cosines(call, vectors, pairs, shared)
        else:
            call.pooled = form.rows
            formatted = await run_limited([_pair_request(call, form, pair, shared) for pair in pairs])
            names = [f"inputs[{number}]" for number in range(len(pairs))]
            computed = await call.rows([one for one, _ in formatted], names, [second for _, second in formatted])
            scores = [form.score(row) for row in computed.rows]
        return ScoredPairs(scores, computed.usage, model.name)

    async def classify(
        self,
        requests: Sequence[GenerateRequest],
        *,
        activated: bool = True,
        cut_tokens: int | None = None,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
        entry: ModelEntry | None = None,
    ) -> LabelledTexts:
        """Return a classifier's results for each request's text or token ids.

        Args:
            activated: whether values are probabilities (by the checkpoint's problem_type) or logits.

        Other arguments and errors are those of :meth:`embed`; raises InvalidRequest for a model that is no classifier.
        """
        _check_count(len(requests))
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        model = entry or await self._gateway.find_entry(requests[0].model, tenant)
        form = LabelForm()
        if model.folder is not None:
            form = await self._form("labels of texts", model, model.folder, read_label_form, model.folder)
        max_tokens = model.limits.max_prompt_tokens
        call = TextCall(self._gateway, model, tenant, max_tokens, cut_tokens, deadline, parent, form.rows)
        computed = await call.rows(requests, [f"inputs[{number}]" for number in range(len(requests))])
        values = [form.values(row, activated) for row in computed.rows]
        return LabelledTexts(values, form.labels, computed.usage, model.name)

    async def _vector_form(self, model: ModelEntry) -> VectorForm:
        """Return the form of a model's vectors. Raises InvalidRequest if it is not supported."""
        if model.folder is None:
            return VectorForm()
        return await self._form("vectors of texts", model, model.folder, read_vector_form, model.folder)

    async def _pair_form(self, model: ModelEntry) -> PairForm:
        """Return the form of a model's scores. Raises InvalidRequest if it is not supported."""
        if model.folder is None:
            return PairForm()
        reranker = is_reranker_name(f"{model.limits.name} {' '.join(model.aliases)} {model.folder}")
        read = partial(read_pair_form, model.folder, model.tokenizer, reranker)
        return await self._form("scores", model, (model.folder, reranker), read)

    async def _form(self, what: str, model: ModelEntry, source: Hashable, read: Callable[..., T], *arguments: Any) -> T:
        """Return ``read(*arguments)``, cached by ``what`` and ``source``, i.e. everything that the result depends on.

        Raises InvalidRequest for a ConfigError, which is cached, too. ``what``: for the error.
        """
        key = what, source
        if key not in self._forms:
            try:
                self._forms[key] = await asyncio.to_thread(read, *arguments)
            except ConfigError as error:
                self._forms[key] = error
        cached = self._forms[key]
        if isinstance(cached, ConfigError):
            raise InvalidRequest(f"model {model.limits.name!r} has no {what}: {cached.message}")
        form: T = cached
        return form


async def _cosines(
    call: TextCall, form: VectorForm, pairs: Sequence[TextPair], shared: GenerateRequest
) -> tuple[list[float], TextRows]:
    """Return the cosine of each pair's vectors; a text in several pairs is computed once."""
    default = form.prompts.get(form.default_prompt, "")
    prompts = {name: form.prompts.get(name, default) for name in (_QUERY_PROMPT, _DOCUMENT_PROMPT)}
    # (prompt, text) -> index of its row.
    indexes: dict[tuple[str, str], int] = {}
    names: list[str] = []

    def index_of(role: str, number: int, text: str) -> int:
        prompted = prompts[role], text
        if prompted not in indexes:
            indexes[prompted] = len(indexes)
            names.append(f"inputs[{number}].{role}")
        return indexes[prompted]

    indexed = [
        (index_of(_QUERY_PROMPT, number, pair.query), index_of(_DOCUMENT_PROMPT, number, pair.document))
        for number, pair in enumerate(pairs)
    ]
    texts = await run_limited([_text_request(call, form, prompt, text, shared) for prompt, text in indexes])
    computed = await call.rows(texts, names)
    return [cosine(computed.rows[query], computed.rows[document]) for query, document in indexed], computed


async def _request_of(call: TextCall, form: VectorForm, prompt: str, request: GenerateRequest) -> GenerateRequest:
    """Return the request of a text with a prompt before it; token ids and messages are unchanged."""
    return await _text_request(call, form, prompt, request.text, request) if request.text else request


async def _text_request(
    call: TextCall, form: VectorForm, prompt: str, text: str, shared: GenerateRequest
) -> GenerateRequest:
    """Return the request of a text with a prompt before it. A text that becomes a message is truncated here: truncated
    later, it would lose the end of the chat template."""
    if not form.as_messages:
        return replace(shared, text=prompt + text)
    system = (ChatMessage("system", prompt),) if prompt else ()
    chat = ChatOptions(add_generation_prompt=False)

    def make(text: str) -> GenerateRequest:
        return replace(shared, text="", messages=(*system, ChatMessage("user", text)), chat=chat)

    return make(text) if call.cut_tokens is None else await _truncated_request(call, make, text, call.cut_tokens)


async def _pair_request(
    call: TextCall, form: PairForm, pair: TextPair, shared: GenerateRequest
) -> tuple[GenerateRequest, int]:
    """Return the request of a pair that is one text, and the position of the second text in it; 0 if the model does not
    mark it.

    Truncation shortens the document until the whole fits, because the model needs the text after it.
    """
    max_tokens = call.cut_tokens
    if form.text is PairText.PAIR:
        size, encode = len(pair.query) + len(pair.document), call.model.tokenizer.encode_pair
        ids, second = await call.gateway.on_thread(
            call.tenant or OPEN, size, encode, pair.query, pair.document, max_tokens
        )
        if max_tokens is not None and len(ids) > max_tokens:
            raise _no_room_error(max_tokens)
        return replace(shared, token_ids=ids), second
    if max_tokens is None:
        return form.request(pair, shared), 0
    return await _truncated_request(
        call, lambda document: form.request(replace(pair, document=document), shared), pair.document, max_tokens
    ), 0


async def _truncated_request(
    call: TextCall, make: Callable[[str], GenerateRequest], text: str, max_tokens: int
) -> GenerateRequest:
    """Return ``make(start)`` for a start of ``text``, about the longest one such that the request has at most
    ``max_tokens`` tokens. Raises InvalidRequest if none is found."""
    text_tokens = max_tokens - len(await call.whole_ids(make("")))
    for _ in range(MAX_CUTS):
        if text_tokens < 1:
            break
        request = make(await _first_tokens(call, text, text_tokens))
        ids = await call.whole_ids(request)
        if len(ids) <= max_tokens:
            return as_ids(request, ids)
        text_tokens -= len(ids) - max_tokens
    raise _no_room_error(max_tokens)


def _no_room_error(max_tokens: int) -> InvalidRequest:
    text = f"the prompt or template around the text leaves no room for it within {max_tokens} tokens"
    return InvalidRequest.of(FieldViolation("truncate_prompt_tokens", text))


async def _first_tokens(call: TextCall, text: str, max_tokens: int) -> str:
    """Return the longest start of a text with at most ``max_tokens`` tokens."""
    return await call.gateway.on_thread(call.tenant or OPEN, len(text), call.model.tokenizer.truncate, text, max_tokens)


def _max_tokens(form: VectorForm | PairForm, model: ModelEntry) -> int:
    """Return the max tokens of a text, or of a pair that is one text."""
    return min(form.max_tokens or model.limits.max_prompt_tokens, model.limits.max_prompt_tokens)


def _check_count(count: int) -> None:
    if not 1 <= count <= MAX_TEXTS:
        raise InvalidRequest.of(FieldViolation("inputs", f"{count} texts; expected 1 to {MAX_TEXTS}"))


def _check_dimensions(dimensions: int | None, width: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= width:
        raise InvalidRequest.of(FieldViolation("dimensions", f"{dimensions} is not in [1, {width}]"))


def _prompt_of(form: VectorForm, name: str | None) -> str:
    """Return the prompt before each text. Raises InvalidRequest for an unknown name."""
    name = form.default_prompt if name is None else name
    if name and name not in form.prompts:
        known = ", ".join(list(form.prompts)[:16]) or "none"
        raise InvalidRequest.of(FieldViolation("prompt_name", f"{name[:100]!r} is not a prompt of the model: {known}"))
    return form.prompts[name] if name else ""


def _to_vector(row: Vector, dimensions: int | None, normalized: bool) -> Vector:
    """Return the first ``dimensions`` values of a row (None: all), normalized if the model's vectors are. Raises
    InvalidRequest if the row has fewer."""
    if dimensions is not None:
        _check_dimensions(dimensions, len(row))
        row = row[:dimensions]
    if not normalized:
        return row
    # In float64, to avoid overflow.
    length = float(np.sqrt(np.square(row, dtype=np.float64).sum()))
    vector: Vector = (row / max(length, 1e-12)).astype(np.float32)
    return vector
