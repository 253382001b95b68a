"""Makes the vectors of the texts of one call: each text is a request of the gateway that generates nothing.

texts --prompt--> all checked --> requests, a few at a time --> last token's row --cut, normalized--> vectors

A request that loses its worker is replayed by the gateway as any other, and its vector comes once, with its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from opentelemetry import context as otel_context

from pillion.errors import ConfigError, FieldViolation, Internal, InvalidRequest, PillionError
from pillion.gateway.admission.tenants import Tenant
from pillion.gateway.gateway import Gateway, ModelEntry
from pillion.gateway.pooling.pooling_files import VectorForm, read_vector_form
from pillion.gateway.request.request_runner import RequestRunner
from pillion.gateway.text_vectors import EmbeddedTexts, Vector
from pillion.types import GenerateRequest, SamplingParams, Usage

# A call has at most this many texts, and so many of them are in the gateway at once.
MAX_TEXTS = 2048
MAX_TEXTS_AT_ONCE = 32
# An error names at most so many of a checkpoint's prompts.
_LISTED_PROMPTS = 16
# The gateway calls the fields of a text by these names.
_OF_TEXT = ("text", "token_ids")

T = TypeVar("T")


class GatewayVectors:
    """Implements :class:`pillion.gateway.text_vectors.TextVectors`, whose docstring has the contract."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        # These are the forms of models' vectors by their folders, or why there are none.
        self._forms: dict[Path, VectorForm | ConfigError] = {}

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
        if not 1 <= len(requests) <= MAX_TEXTS:
            raise InvalidRequest.of(FieldViolation("inputs", f"{len(requests)} texts; from 1 to {MAX_TEXTS}"))
        model = entry or await self._gateway.find_entry(requests[0].model, tenant)
        form = await self._form_of(model)
        before = _prompt_of(form, prompt_name)
        asked = [
            replace(request, text=before + request.text if request.text else "", sampling=SamplingParams(max_tokens=0))
            for request in requests
        ]
        for number, request in enumerate(asked):
            # All texts are checked before any text is run.
            await _named(number, self._gateway.check(request, tenant))
        turns = asyncio.Semaphore(MAX_TEXTS_AT_ONCE)
        runners: dict[int, RequestRunner] = {}

        async def run(number: int) -> Vector:
            async with turns:
                runner = runners[number] = await self._gateway.generate(
                    asked[number], tenant=tenant, timeout_s=timeout_s, parent=parent, entry=model, pooled=True
                )
                return _cut(await _vector_of(runner), dimensions, form.normalized)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_named(number, run(number))) for number in range(len(asked))]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for runner in runners.values():
                runner.cancel()
        inputs = [runners[number].admitted.own_prompt for number in range(len(asked))]
        usage = sum((runner.usage() for runner in runners.values()), Usage(0, 0, 0))
        return EmbeddedTexts([task.result() for task in tasks], inputs, usage, model.name)

    async def _form_of(self, model: ModelEntry) -> VectorForm:
        """Returns the form of a model's vectors. Raises InvalidRequest where the checkpoint's is not supported."""
        if model.folder is None:
            return VectorForm()
        found = self._forms.get(model.folder)
        if found is None:
            try:
                found = await asyncio.to_thread(read_vector_form, model.folder)
            except ConfigError as error:
                found = error
            self._forms[model.folder] = found
        if isinstance(found, ConfigError):
            raise InvalidRequest(f"model {model.limits.name!r} gives no vectors of texts: {found.message}")
        return found


def _prompt_of(form: VectorForm, name: str | None) -> str:
    """Returns what stands before each text. Raises InvalidRequest for a name that the checkpoint does not have."""
    name = form.default_prompt if name is None else name
    if name and name not in form.prompts:
        known = ", ".join(list(form.prompts)[:_LISTED_PROMPTS]) or "none"
        raise InvalidRequest.of(FieldViolation("prompt_name", f"{name[:100]!r} is no prompt of the model's: {known}"))
    return form.prompts[name] if name else ""


async def _vector_of(runner: RequestRunner) -> Vector:
    """Waits for a request's end. Raises PillionError."""
    async for _ in runner:
        pass
    if not runner.vector:
        raise Internal("a worker of an older version gave no vector")
    return np.frombuffer(runner.vector, "<f4").astype(np.float32)


def _cut(vector: Vector, dimensions: int | None, normalized: bool) -> Vector:
    """Returns the vector's first values, as a vector of the length 1 where the model's have that length. Raises
    InvalidRequest for more values than there are."""
    if dimensions is not None:
        if not 1 <= dimensions <= len(vector):
            wrong = FieldViolation("dimensions", f"{dimensions} is not in [1, {len(vector)}]")
            raise InvalidRequest.of(wrong)
        vector = vector[:dimensions]
    if not normalized:
        return vector
    # The length is summed up in float64, so that it does not overflow where the values do not.
    length = float(np.sqrt(np.square(vector, dtype=np.float64).sum()))
    found: Vector = (vector / max(length, 1e-12)).astype(np.float32)
    return found


async def _named(number: int, work: Awaitable[T]) -> T:
    """Awaits what is done for one text. What it raises says which text that is."""
    try:
        return await work
    except InvalidRequest as error:
        raise _at(number, error) from None
    except PillionError as error:
        error.add_note(f"text {number}")
        raise


def _at(number: int, error: InvalidRequest) -> InvalidRequest:
    """Returns an error whose fields begin with the text's number, where they are the text's."""
    named = []
    for one in error.violations:
        begins = next((name for name in _OF_TEXT if one.field.startswith(name)), "")
        named.append(replace(one, field=f"inputs[{number}]{one.field.removeprefix(begins)}") if begins else one)
    return InvalidRequest.of(*named) if named else error
