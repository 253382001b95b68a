""":class:`LLM` runs the engine in this process, without servers, with vLLM's call signatures.

    from pillion import LLM, SamplingParams

    with LLM("demo") as llm:
        for output in llm.generate(["Once upon a time", "The sea"], SamplingParams(temperature=0, max_tokens=32)):
            print(output.prompt, output.outputs[0].text)

Differences from vLLM: ``max_tokens`` defaults to the rest of the context, not 16; options of :class:`LLM` are Pillion's
flags, or vLLM's if :mod:`pillion.offline.vllm_options` maps them; unsupported features (images, classes) are refused,
never ignored.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import json
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pillion.client.answer_schema import AnswerSchema, ParsedAnswers, Schema, answer_schema, with_schema
from pillion.client.batch import one_each
from pillion.client.client_requests import (
    Message,
    chat_options,
    chat_request,
    prompt_request,
    respelled,
    to_pb,
    tool_options,
)
from pillion.client.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OutputCollector,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pillion.config import OfflineFlags
from pillion.errors import Cancelled, ConfigError, FieldViolation, InvalidRequest, PermissionDenied, PillionError
from pillion.offline.vllm_options import (
    LoRARequest,
    check_producer,
    no_pooling,
    producer_of,
    refused_method,
    translated,
)
from pillion.types import ClusterStatus, GenerateRequest, ModelInfo, SamplingParams, Tool, Value
from pillion.wire.public import request_from_pb

if TYPE_CHECKING:
    from pillion.offline.offline_cluster import OfflineCluster

# A text, token ids, or one of vLLM's dicts: {"prompt": text} or {"prompt_token_ids": ids}, optionally with
# "cache_salt".
OfflinePrompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model in this process: a decode worker, its KV pool and the gateway's logic, on separate threads.

    Usable from several threads at once, and inside a running event loop (a notebook). Prefixes are cached across calls.
    It ends with :meth:`close`, as a context manager, with its last reference, or with the interpreter, leaving nothing
    behind. While it lives, torch's own operators use one thread in this process.

    Args:
        model: Hugging Face folder, GGUF file, hub id, or "demo".
        seed: source of the seeds of requests without one, in order, which makes a program's answers reproducible. None:
            random.
        options: fields of :class:`pillion.config.OfflineFlags`, such as ``dtype``, ``max_model_len``,
            ``kv_pool_bytes="2GiB"``, ``max_num_seqs``, ``enable_prefix_caching`` and ``speculative_config``, which may
            be a dict, as in vLLM. ``quantization`` may name the producer of the checkpoint, such as "awq".

    Raises:
        ConfigError: an impossible model or option, or missing server packages.
        TypeError: an unknown option.
    """

    def __init__(self, model: str, **options: Any) -> None:
        seed = options.pop("seed", None)
        if seed is not None and type(seed) is not int:
            raise ConfigError(f"seed {seed!r} is not an int")
        self.flags = read_options(model, options)
        self._seeds = None if seed is None else random.Random(seed)  # noqa: S311  (a seed makes answers repeatable)
        self._brought: dict[str, str] = {}
        self._bringing = threading.Lock()
        from pillion.supervisor.component_process import require_server_packages

        require_server_packages("pillion.LLM needs")
        from pillion.offline.offline_cluster import OfflineThread

        wanted = producer_of(options)
        self._thread = OfflineThread(self.flags, lambda folder: check_producer(wanted, self.flags.model, folder))
        # Refers to the thread's method and not to this object, which it would keep alive.
        self._finalizer = weakref.finalize(self, self._thread.close)
        self._finalizer.atexit = False

    def generate(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = 0,
        schema: Schema[Value] | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput[Value]]:
        """Return the whole answers to one prompt or many, in the prompts' order.

        Args:
            prompts: one or a list: texts, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            sampling_params: one for all prompts, or one per prompt.
            use_tqdm: show a bar; a callable replaces tqdm.
            prompt_token_ids: one or many prompts as token ids, instead of ``prompts``.
            lora_request: an adapter with its folder, or one per prompt, instead of ``lora``.
            priority: smaller is more urgent; one for all, or one per prompt.
            schema: make every answer JSON that fits it, with its value as ``parsed``; see
                :meth:`pillion.AsyncClient.generate`.
            lora: the name of an adapter, or one per prompt; "" for the model alone.

        Raises:
            PillionError: of the first prompt that fails; the others are cancelled. A note names the prompt.
            ValueError: a wrong number of sampling parameters, priorities or adapters, or prompts twice or never.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give one of prompts and prompt_token_ids")
        listed = _listed(prompt_token_ids if prompts is None else prompts)
        lora = lora if lora_request is None else self._bring(lora_request, lora)
        requests = [_of_prompt(prompt, f"prompts[{n}]") for n, prompt in enumerate(listed)]
        return self._run(_with_adapters(requests, lora), sampling_params, use_tqdm, priority, schema)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = 0,
        schema: Schema[Value] | None = None,
        lora: str | Sequence[str] = "",
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "",
        parallel_tool_calls: bool | None = None,
    ) -> list[RequestOutput[Value]]:
        """Return the assistant's next message in one conversation or many. The prompts are rendered by the model's own
        template, or by ``chat_template``, a Jinja text.

        ``messages`` are ``{"role": ..., "content": ...}`` or ChatMessage. The other arguments are those of
        :meth:`generate` and :meth:`pillion.AsyncClient.chat`.
        """
        options = chat_options(add_generation_prompt, continue_final_message, chat_template_kwargs)
        called = tool_options(tools or (), tool_choice, parallel_tool_calls)
        lora = lora if lora_request is None else self._bring(lora_request, lora)
        one = not messages or isinstance(messages[0], Mapping) or hasattr(messages[0], "role")
        conversations: Any = [messages] if one else messages
        requests = [chat_request(conversation, chat=options, tools=called) for conversation in conversations]
        adapted = _with_adapters(requests, lora)
        return self._run(adapted, sampling_params, use_tqdm, priority, schema, chat_template or "")

    def embed(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        priority: int | None = 0,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of one text or many, in the prompts' order, as the checkpoint's sentence-transformers
        files specify: that of the last token, normalized.

        Args:
            prompts: one or a list: texts, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``.
            dimensions: number of leading values wanted of each vector; None: all.
            prompt_name: which of the checkpoint's prompts precedes each text; None: its default, "": none.
            truncate_prompt_tokens: truncate texts to this number of tokens, -1: to the model's max; None: refuse texts
                that are too long.
            lora: the name of an adapter; "" for the model alone.
            priority: smaller is more urgent.

        Raises PillionError of the first text that fails; an invalid field begins with ``inputs[n]``.
        """
        requests = _texts(prompts, lora, priority)
        vectors, cut_tokens = self._thread.cluster.vectors, truncate_prompt_tokens
        asked = vectors.embed(requests, dimensions=dimensions, prompt_name=prompt_name, cut_tokens=cut_tokens)
        found = self._waited(asked)
        return [
            EmbeddingRequestOutput(outputs=EmbeddingOutput(vector.tolist()), prompt_token_ids=list(ids))
            for vector, ids in zip(found.vectors, found.token_ids, strict=True)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        priority: int | None = 0,
    ) -> list[ScoringRequestOutput]:
        """Return how well each of the second texts answers the first one, in order: a cosine of vectors, or a
        reranker's score.

        Args:
            data_1: one text, or one per text of ``data_2``.
            data_2: one text or a list.
            instruction: a reranker's criterion; None: its checkpoint's.
            truncate_prompt_tokens: truncate texts to this number of tokens, -1: to the model's max; where a pair is one
                text, its second part is truncated.
            lora, priority: as in :meth:`embed`.

        Raises PillionError of the first pair that fails, and ValueError for lists of different length.
        """
        from pillion.gateway.pooling.pair_forms import TextPair

        first, second = ([one] if isinstance(one, str) else list(one) for one in (data_1, data_2))
        first = first * len(second) if len(first) == 1 else first
        shared = GenerateRequest(model=lora, priority=priority or 0)
        vectors = self._thread.cluster.vectors
        pairs = [TextPair(*pair) for pair in zip(first, second, strict=True)]
        asked = vectors.score(pairs, shared, instruction=instruction, cut_tokens=truncate_prompt_tokens)
        return [ScoringRequestOutput(outputs=ScoringOutput(score)) for score in self._waited(asked).scores]

    def classify(
        self,
        prompts: OfflinePrompt | Sequence[OfflinePrompt],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        priority: int | None = 0,
    ) -> list[ClassificationRequestOutput]:
        """Return a classifier's probability per label for one text or many, in the prompts' order.

        Args:
            use_activation: False returns logits instead of probabilities.
            prompts, truncate_prompt_tokens, lora, priority: as in :meth:`embed`.

        Raises PillionError of the first text that fails; an invalid field begins with ``inputs[n]``.
        """
        requests = _texts(prompts, lora, priority)
        vectors = self._thread.cluster.vectors
        found = self._waited(vectors.classify(requests, activated=use_activation, cut_tokens=truncate_prompt_tokens))
        return [
            ClassificationRequestOutput(outputs=ClassificationOutput(values.tolist()), labels=found.labels)
            for values in found.values
        ]

    def _waited(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the engine's thread and wait for it; leaving the call cancels it."""
        work = self._thread.submit(coroutine)
        try:
            return work.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the LLM was closed") from None
        finally:
            work.cancel()

    # Methods of vLLM that return hidden states or rewards.
    encode = no_pooling("encode")
    reward = no_pooling("reward")
    beam_search = refused_method("beam_search", "Pillion samples; several answers come with SamplingParams(n=...)")

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as an object of transformers, with its chat template."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self._thread.cluster.entry.folder), trust_remote_code=False)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's recommended sampling parameters. Its fields may be set, as in vLLM."""
        found = self._thread.cluster.entry.sampling
        return EditableSamplingParams(**{field.name: getattr(found, field.name) for field in fields(SamplingParams)})

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> ModelInfo:
        """Name the LoRA adapter in a folder, as PEFT writes it, for subsequent calls. Requires ``enable_lora=True``.
        With ``in_place``, the name may be that of another adapter, which then loses it. Raises PillionError with the
        reason why the adapter cannot be served."""
        self._need_adapters()
        gateway = self._thread.cluster.gateway
        folder = str(Path(path).expanduser().resolve())
        found: ModelInfo = self._waited(gateway.load_adapter(None, name, folder, in_place=in_place))
        return found

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter's name; running calls continue. Raises NotFound."""
        self._need_adapters()
        self._waited(self._thread.cluster.gateway.unload_adapter(None, name))

    def status(self) -> ClusterStatus:
        """Return the components, their load, and totals, like :meth:`pillion.Client.status`. Raises PillionError."""

        async def read() -> ClusterStatus:
            found: ClusterStatus = self._thread.cluster.gateway.status()
            return found

        return self._thread.submit(read()).result()

    def close(self) -> None:
        """Cancel all calls, end all threads, processes and sockets, and free the memory. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _need_adapters(self) -> None:
        if not self.flags.enable_lora:
            raise PermissionDenied("this LLM serves no adapters: make it as LLM(..., enable_lora=True)")

    def _bring(self, wanted: LoRARequest | Sequence[LoRARequest | None], lora: str | Sequence[str]) -> str | list[str]:
        """Load new adapters of requests; return their names."""
        if lora:
            raise ValueError("give one of lora and lora_request")
        requests = [wanted] if isinstance(wanted, LoRARequest) else list(wanted)
        with self._bringing:
            for request in filter(None, requests):
                before = self._brought.get(request.lora_name)
                if before != request.lora_path:
                    self.load_adapter(request.lora_name, request.lora_path, in_place=before is not None)
                    self._brought[request.lora_name] = request.lora_path
        names = [request.lora_name if request else "" for request in requests]
        return names[0] if isinstance(wanted, LoRARequest) else names

    def _seeded(self, sampling: SamplingParams) -> SamplingParams:
        if self._seeds is None or sampling.seed not in (None, -1):
            return sampling
        return replace(sampling, seed=self._seeds.getrandbits(63))

    def _run(
        self,
        requests: list[GenerateRequest],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        schema: Schema | None,
        template: str = "",
    ) -> list[RequestOutput]:
        shape = None if schema is None else answer_schema(schema)
        priorities = list(priority) if isinstance(priority, Sequence) else [priority or 0] * len(requests)
        if len(priorities) != len(requests):
            raise ValueError(f"{len(requests)} prompts and {len(priorities)} priorities: give one, or one for each")
        given = one_each(sampling, {}, len(requests))
        complete = [
            # Through the wire format, for the types, roundings and refusals of a gateway.
            request_from_pb(to_pb(replace(request, sampling=with_schema(self._seeded(each), shape), priority=urgency)))
            for request, each, urgency in zip(requests, given, priorities, strict=True)
        ]
        done: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        work = self._thread.submit(_answer_all(self._thread.cluster, complete, done, shape, template))
        work.add_done_callback(lambda _: done.put(None))
        outputs: dict[int, RequestOutput] = {}
        try:
            with _progress(len(complete), use_tqdm) as advance:
                while (item := done.get()) is not None:
                    outputs[item[0]] = item[1]
                    advance(item[1])
            work.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the LLM was closed") from None
        finally:
            work.cancel()
        return [outputs[n] for n in range(len(complete))]


class EditableSamplingParams(SamplingParams):
    """Sampling parameters with assignable fields, like vLLM's."""

    __setattr__ = object.__setattr__
    __hash__ = None  # type: ignore[assignment]  # what may change has no hash


async def _answer_all(
    cluster: OfflineCluster,
    requests: Sequence[GenerateRequest],
    done: queue.SimpleQueue[tuple[int, RequestOutput] | None],
    schema: AnswerSchema | None,
    template: str,
) -> None:
    """Answer all requests, as many at once as the limit allows. A nonempty ``template`` replaces the model's own. The
    first error ends the others and is raised."""

    async def answer(index: int, request: GenerateRequest) -> None:
        try:
            entry = await entry_of(request)
            done.put((index, await _answer(cluster, request, schema, entry)))
        except Exception as error:  # noqa: BLE001  (it is raised again)
            found = respelled(error, f"prompts[{index}]") if isinstance(error, PillionError) else error
            found.add_note(f"prompt {index} of {len(requests)}")
            raise found from None

    try:
        async with cluster.templated(template) as entry_of, asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                answers = request.sampling.best_of or request.sampling.n or 1
                await cluster.limit.take(answers)
                task = group.create_task(answer(index, request))
                task.add_done_callback(lambda _, answers=answers: cluster.limit.release(answers))  # type: ignore[misc]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _answer(
    cluster: OfflineCluster, request: GenerateRequest, schema: AnswerSchema | None, entry: Any
) -> RequestOutput:
    parsed = None if schema is None else ParsedAnswers(schema.parse)
    runner = await cluster.gateway.generate(request, entry=entry)
    try:
        ids = list(runner.admitted.prompt)
        text = request.text or (cluster.prompt_text(ids) if request.messages else None)
        sampling = request.sampling
        scored = sampling.prompt_logprobs is not None
        collector = OutputCollector(text, ids, sampling.logprobs is not None, cluster.token_text, scored)
        async for delta in runner:
            collector.add(delta if parsed is None else parsed.note(delta))
        return collector.output()
    finally:
        runner.cancel()


def read_options(model: str, options: Mapping[str, Any]) -> OfflineFlags:
    """Convert options, Pillion's or vLLM's, to flags. Raises TypeError for an unknown option, ConfigError for an
    invalid value."""
    known = {field.name: field for field in fields(OfflineFlags) if field.name != "model"}
    given: dict[str, Any] = {}
    for name, value in translated(str(model), options).items():
        if name not in known:
            raise TypeError(f"LLM has no option {name!r}; it has: {', '.join(sorted(known))}")
        about = known[name].metadata
        kind, wanted = about["kind"], type(known[name].default)
        try:
            value = json.dumps(value) if isinstance(value, Mapping) else value
            if wanted is tuple:
                value = (value,) if isinstance(value, str) else tuple(map(kind, value))
            value = kind(value) if isinstance(value, str) and kind is not bool else value
        except (ValueError, TypeError):
            raise ConfigError(f"{name} {value!r} is no {wanted.__name__}") from None
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ConfigError(f"{name} {value!r} is no {wanted.__name__}")
        if about["choices"] and value not in about["choices"]:
            raise ConfigError(f"{name} {value!r} is not one of {', '.join(about['choices'])}")
        given[name] = value
    return OfflineFlags(model=str(model), **given)


def _with_adapters(requests: list[GenerateRequest], lora: str | Sequence[str]) -> list[GenerateRequest]:
    """Return the requests with the names of their adapters. Raises ValueError for a wrong number of names."""
    names = [lora] * len(requests) if isinstance(lora, str) else list(lora)
    if len(names) != len(requests):
        raise ValueError(f"{len(requests)} prompts and {len(names)} adapters: give one, or one for each")
    return [replace(request, model=name) for request, name in zip(requests, names, strict=True)]


def _listed(prompts: Any) -> Sequence[Any]:
    """Return the prompts as a list, also for a single prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def _texts(prompts: Any, lora: str, priority: int | None) -> list[GenerateRequest]:
    """Return the requests of texts to embed, score or classify."""
    requests = (_of_prompt(prompt, f"prompts[{n}]") for n, prompt in enumerate(_listed(prompts)))
    return [replace(request, model=lora, priority=priority or 0) for request in requests]


def _of_prompt(prompt: Any, where: str) -> GenerateRequest:
    """Return the request of one prompt. Raises InvalidRequest, which names ``where``."""
    cache_salt = ""
    if isinstance(prompt, Mapping):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
        if unknown:
            raise InvalidRequest.of(*(FieldViolation(f"{where}.{name}", "not supported") for name in unknown))
        ids, text, cache_salt = prompt.get("prompt_token_ids"), prompt.get("prompt"), prompt.get("cache_salt") or ""
        if (ids is None) == (text is None):
            raise InvalidRequest.of(FieldViolation(where, "give one of prompt and prompt_token_ids"))
        prompt = list(ids) if ids is not None else str(text)
    try:
        return prompt_request(prompt, cache_salt=cache_salt)
    except InvalidRequest as error:
        raise respelled(error, where) from None


@contextlib.contextmanager
def _progress(total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Callable[[RequestOutput], None]]:
    """Show vLLM's bar: finished prompts, and tokens per second in and out. Yield the function to call per output."""
    if not use_tqdm:
        yield lambda _: None
        return
    make: Any = use_tqdm
    if use_tqdm is True:
        make = importlib.import_module("tqdm.auto").tqdm
    began, tokens = time.monotonic(), [0, 0]
    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:

        def advance(output: RequestOutput) -> None:
            if output.usage is not None:
                tokens[0] += output.usage.prompt_tokens
                tokens[1] += output.usage.completion_tokens
            rate_in, rate_out = (count / max(time.monotonic() - began, 1e-9) for count in tokens)
            bar.set_postfix_str(f"in: {rate_in:.1f} toks/s, out: {rate_out:.1f} toks/s", refresh=False)
            bar.update(1)

        yield advance
