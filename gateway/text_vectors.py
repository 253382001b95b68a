"""Defines the seam at which a room makes vectors of texts (embeddings), for the doors that ask for them."""

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


@dataclass(frozen=True, slots=True)
class EmbeddedTexts:
    """Holds the vectors of texts in their order, the token ids of each, the tokens of all, and the model's name."""

    vectors: list[Vector]
    token_ids: list[tuple[int, ...]]
    usage: Usage
    model: str


class TextVectors(Protocol):
    """Makes the vectors of texts as requests of one gateway."""

    async def embed(
        self,
        requests: Sequence[GenerateRequest],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        tenant: Tenant | None = None,
        timeout_s: float | None = None,
        parent: otel_context.Context | None = None,
        entry: ModelEntry | None = None,
    ) -> EmbeddedTexts:
        """Returns the vector of each request's text or token ids; the requests differ in these alone.

        Args:
            dimensions: how many values of each vector are wanted, from its first one on; None: all.
            prompt_name: which of the checkpoint's prompts stands before each text; None: its default, "": none.
            tenant, timeout_s, parent, entry: those of :meth:`Gateway.generate`.

        Raises what Gateway.generate raises, for the first text that fails; the others are cancelled. A wrong field
        begins with ``inputs[n]``. ConfigError is raised where the checkpoint pools otherwise than is supported.
        """


VECTORS = Seam[Callable[[Gateway], TextVectors]]("gateway.vectors")
