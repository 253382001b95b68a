"""Defines the seam at which pooling makes vectors of texts (embeddings), scores of pairs and labels of texts, for the
doors that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from opentelemetry import context as otel_context

from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.rooms import Seam
from pillion.types import GenerateRequest, Usage

Vector = npt.NDArray[np.float32]
# This cut keeps as many tokens of each text as the model takes, as vLLM's truncate_prompt_tokens has it.
CUT_TO_MODEL = -1


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """Holds the vectors of texts in their order, the token ids of each, the tokens of all, and the model's name."""

    vectors: list[Vector]
    token_ids: list[tuple[int, ...]]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class TextPair:
    """Holds two texts that are scored together: what is asked, and what may answer it."""

    query: str
    document: str


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """Holds the scores of pairs in their order, the tokens of all, and the model's name. A larger score says that the
    document answers the query better: a cosine from -1 to 1, or a probability, as the checkpoint has it."""

    scores: list[float]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Holds what a classifier says of texts in their order.

    Attributes:
        values: for each text [labels], a probability of each label, or its logit where these were asked for.
        labels: the labels' names, in the order of the values.
    """

    values: list[Vector]
    labels: tuple[str, ...]
    usage: Usage
    model: str


class TextVectors(Protocol):
    """Makes the vectors and labels of texts, and the scores of pairs, as requests of one gateway."""

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
        """Returns the vector of each request's text or token ids; the requests differ in these alone.

        Args:
            dimensions: how many values of each vector are wanted, from its first one on; None: all.
            prompt_name: which of the checkpoint's prompts stands before each text; None: its default, "": none.
            cut_tokens: a text with more tokens loses those after its first ones, and keeps the special tokens that its
                tokenizer adds; CUT_TO_MODEL: more than the model takes; None: such a text is refused.
            timeout_s: time for all texts together; None for no limit.
            tenant, parent, entry: those of :meth:`Gateway.generate`.

        Raises what Gateway.generate raises, for the first text that fails; the others are cancelled. A wrong field
        begins with ``inputs[n]``. InvalidRequest is raised where the checkpoint pools otherwise than is supported.
        """

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
        """Returns the score of each pair, as the checkpoint makes scores.

        Args:
            shared: has the model, salt, priority and id of all requests.
            instruction: what a reranker is told to look for; None: what its checkpoint says.
            cut_tokens: as :meth:`embed` has it, for each text that is computed; where query and document are one text,
                the document is cut so that the whole has so many tokens.
            document_tokens: a document with more tokens loses those after its first ones; None: none is cut.

        The other arguments, and what is raised, are those of :meth:`embed`; a wrong field begins with
        ``inputs[n].query`` or ``inputs[n].document``, or ``inputs[n]`` for both together.
        """

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
        """Returns what a classifier says of each request's text or token ids.

        Args:
            activated: whether values are probabilities, as the checkpoint's problem_type has it, and not logits.

        The other arguments, and what is raised, are those of :meth:`embed`; InvalidRequest is raised for a model that
        is no classifier.
        """


VECTORS = Seam[Callable[[Gateway], TextVectors]]("gateway.vectors")
