"""Declares the sampling values that a body has by their own names: the rows of
:class:`pillion.types.SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from pillion.types import SAMPLING_OPTIONS

# Larger integers have no use in a body, and their digits alone could be megabytes.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def sampling_body(door: str) -> Any:
    """Makes a struct of the sampling values that the bodies of one API (``door``) have, all of which may be left
    out."""
    mine = ((name, one) for name, one in SAMPLING_OPTIONS.items() if door in one.doors)
    values = [(name, (Int if one.whole else float) | None, None) for name, one in mine]
    return msgspec.defstruct("SamplingBody", values, kw_only=True, forbid_unknown_fields=True)


def sampling_of(body: msgspec.Struct, door: str) -> dict[str, Any]:
    """Returns a body's sampling values by their names in SamplingParams."""
    return {name: getattr(body, name) for name, one in SAMPLING_OPTIONS.items() if door in one.doors}


if TYPE_CHECKING:

    class CompletionSampling(msgspec.Struct, kw_only=True):
        """Holds the sampling values of chats and completions; the code reads these by name."""

        min_tokens: int | None = None
        n: int | None = None
        best_of: int | None = None
        prompt_logprobs: int | None = None
        truncate_prompt_tokens: int | None = None

    class ResponsesSampling(msgspec.Struct, kw_only=True):
        """Holds the sampling values of a response; the code reads these by name."""

        temperature: float | None = None
        top_p: float | None = None

else:
    CompletionSampling, ResponsesSampling = sampling_body("completions"), sampling_body("responses")
