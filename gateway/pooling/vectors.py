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
from pillion.gateway.pooling.text_call import MAX_TEXTS, TextCall, TextRows, as_ids, in_turns
from pillion.types import ChatMessage, ChatOptions, GenerateRequest, Usage

_LISTED_PROMPTS = 16
# Max truncations of a pair's document until the whole text fits: a truncated text may have other tokens.
MAX_CUTS = 4
# Prompts, if the checkpoint has them, before the texts of a pair, as in sentence-transformers' encode_query and
# encode_document.
_QUERY_PROMPT, _DOCUMENT_PROMPT = "query", "document"

_NO_ANSWER = ChatOptions(add_generation_prompt=False)

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
        before = _prompt_of(form, prompt_name)
        pooled = PoolingRows(pooling=form.pooling)
        call = TextCall(self._gateway, model, tenant, _most(form, model), cut_tokens, deadline, parent, pooled)
        asked = await in_turns([_request_of(call, form, before, one) for one in requests])
        found = await call.rows(asked, [f"inputs[{number}]" for number in range(len(asked))])
        vectors = [_cut(row, dimensions, form.normalized) for row in found.rows]
        return EmbeddedTexts(vectors, found.token_ids, found.usage, model.name)

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
        most = _most(vectors if form.kind is ScoreKind.COSINE else form, model)
        call = TextCall(self._gateway, model, tenant, most, cut_tokens, deadline, parent)
        if document_tokens is not None:
            cut = await in_turns([_first_tokens(call, pair.document, document_tokens) for pair in pairs])
            pairs = [replace(pair, document=document) for pair, document in zip(pairs, cut, strict=True)]
        if form.kind is ScoreKind.COSINE:
            call.pooled = PoolingRows(pooling=vectors.pooling)
            scores, found = await _cosines(call, vectors, pairs, shared)
        else:
            call.pooled = form.rows
            asked = await in_turns([_pair_request(call, form, pair, shared) for pair in pairs])
            names = [f"inputs[{number}]" for number in range(len(pairs))]
            found = await call.rows([one for one, _ in asked], names, [second for _, second in asked])
            scores = [form.score(row) for row in found.rows]
        return ScoredPairs(scores, found.usage, model.name)

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
        most = model.limits.max_prompt_tokens
        call = TextCall(self._gateway, model, tenant, most, cut_tokens, deadline, parent, form.rows)
        found = await call.rows(requests, [f"inputs[{number}]" for number in range(len(requests))])
        return LabelledTexts([form.values(row, activated) for row in found.rows], form.labels, found.usage, model.name)

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
        """Return the result of ``read``, cached by ``source``: the folder and all else that the form depends on."""
        key = what, source
        if key not in self._forms:
            try:
                self._forms[key] = await asyncio.to_thread(read, *arguments)
            except ConfigError as error:
                self._forms[key] = error
        found = self._forms[key]
        if isinstance(found, ConfigError):
            raise InvalidRequest(f"model {model.limits.name!r} has no {what}: {found.message}")
        form: T = found
        return form


async def _cosines(
    call: TextCall, form: VectorForm, pairs: Sequence[TextPair], shared: GenerateRequest
) -> tuple[list[float], TextRows]:
    """Return the cosine of each pair's vectors; a text in several pairs is computed once."""
    default = form.prompts.get(form.default_prompt, "")
    prompts = {name: form.prompts.get(name, default) for name in (_QUERY_PROMPT, _DOCUMENT_PROMPT)}
    places: dict[tuple[str, str], int] = {}
    names: list[str] = []

    def place(role: str, number: int, text: str) -> int:
        whole = prompts[role], text
        if whole not in places:
            places[whole] = len(places)
            names.append(f"inputs[{number}].{role}")
        return places[whole]

    asked = [
        (place(_QUERY_PROMPT, number, pair.query), place(_DOCUMENT_PROMPT, number, pair.document))
        for number, pair in enumerate(pairs)
    ]
    texts = await in_turns([_asked_of(call, form, prompt, text, shared) for prompt, text in places])
    found = await call.rows(texts, names)
    return [cosine(found.rows[query], found.rows[document]) for query, document in asked], found


async def _request_of(call: TextCall, form: VectorForm, prompt: str, request: GenerateRequest) -> GenerateRequest:
    """Return the request of a text with a prompt before it; token ids and messages are unchanged."""
    return await _asked_of(call, form, prompt, request.text, request) if request.text else request


async def _asked_of(
    call: TextCall, form: VectorForm, prompt: str, text: str, shared: GenerateRequest
) -> GenerateRequest:
    """Return the request of a text with a prompt before it. If the text is a message, it is truncated here, so that
    the chat template's end is preserved."""
    if not form.as_messages:
        return replace(shared, text=prompt + text)
    system = (ChatMessage("system", prompt),) if prompt else ()

    def make(text: str) -> GenerateRequest:
        return replace(shared, text="", messages=(*system, ChatMessage("user", text)), chat=_NO_ANSWER)

    return make(text) if call.cut_tokens is None else await _truncated_request(call, make, text, call.cut_tokens)


async def _pair_request(
    call: TextCall, form: PairForm, pair: TextPair, shared: GenerateRequest
) -> tuple[GenerateRequest, int]:
    """Return the request of a pair that is one text, and the position of the second text, 0 if the model does not mark
    it.

    Truncation shortens the document until the whole fits, because the model needs the text after it.
    """
    most = call.cut_tokens
    if form.text is PairText.PAIR:
        size, encode = len(pair.query) + len(pair.document), call.model.tokenizer.encode_pair
        ids, second = await call.gateway.on_thread(call.tenant or OPEN, size, encode, pair.query, pair.document, most)
        if most is not None and len(ids) > most:
            raise _no_room_error(most)
        return replace(shared, token_ids=ids), second
    if most is None:
        return form.request(pair, shared), 0
    return await _truncated_request(
        call, lambda document: form.request(replace(pair, document=document), shared), pair.document, most
    ), 0


async def _truncated_request(
    call: TextCall, make: Callable[[str], GenerateRequest], text: str, most: int
) -> GenerateRequest:
    """Return the request that ``make`` creates from the start of a text, such that the whole has at most ``most``
    tokens."""
    kept = most - len(await call.whole_ids(make("")))
    for _ in range(MAX_CUTS):
        if kept < 1:
            break
        request = make(await _first_tokens(call, text, kept))
        ids = await call.whole_ids(request)
        if len(ids) <= most:
            return as_ids(request, ids)
        kept -= len(ids) - most
    raise _no_room_error(most)


def _no_room_error(most: int) -> InvalidRequest:
    text = f"the prompt or template around the text leaves no room for it within {most} tokens"
    return InvalidRequest.of(FieldViolation("truncate_prompt_tokens", text))


async def _first_tokens(call: TextCall, text: str, most: int) -> str:
    """Return the longest start of a text with at most ``most`` tokens."""
    return await call.gateway.on_thread(call.tenant or OPEN, len(text), call.model.tokenizer.truncate, text, most)


def _most(form: VectorForm | PairForm, model: ModelEntry) -> int:
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
        known = ", ".join(list(form.prompts)[:_LISTED_PROMPTS]) or "none"
        raise InvalidRequest.of(FieldViolation("prompt_name", f"{name[:100]!r} is not a prompt of the model: {known}"))
    return form.prompts[name] if name else ""


def _cut(vector: Vector, dimensions: int | None, normalized: bool) -> Vector:
    """Truncate a vector, and normalize it if the model's vectors are. Raises InvalidRequest for more values than it
    has."""
    if dimensions is not None:
        _check_dimensions(dimensions, len(vector))
        vector = vector[:dimensions]
    if not normalized:
        return vector
    # In float64, to avoid overflow.
    length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
    found: Vector = (vector / max(length, 1e-12)).astype(np.float32)
    return found
