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
    translate_options,
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
    It is closed by :meth:`close`, at the end of a ``with`` block, with its last reference, or at interpreter exit.
    Until then, torch's own operators use one thread in this process.

    Args:
        model: Hugging Face folder, GGUF file, hub id, or "demo".
        seed: determines the seeds of requests without their own, in the order of the requests, so that a program's
            answers are reproducible. None: random seeds.
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
        # Folders of the adapters that requests have loaded, by name.
        self._lora_paths: dict[str, str] = {}
        self._lora_lock = threading.Lock()
        from pillion.supervisor.component_process import require_server_packages

        require_server_packages("pillion.LLM needs")
        from pillion.offline.offline_cluster import OfflineThread

        producer = producer_of(options)
        self._thread = OfflineThread(self.flags, lambda folder: check_producer(producer, self.flags.model, folder))
        # Must not refer to this object, which it would keep alive.
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
        """Return the complete answers to one prompt or many, in the prompts' order.

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
        prompt_list = _as_list(prompt_token_ids if prompts is None else prompts)
        lora = lora if lora_request is None else self._load_lora_requests(lora_request, lora)
        requests = [_request_of(prompt, f"prompts[{n}]") for n, prompt in enumerate(prompt_list)]
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
        function_calling = tool_options(tools or (), tool_choice, parallel_tool_calls)
        lora = lora if lora_request is None else self._load_lora_requests(lora_request, lora)
        is_single = not messages or isinstance(messages[0], Mapping) or hasattr(messages[0], "role")
        conversations: Any = [messages] if is_single else messages
        requests = [chat_request(conversation, chat=options, tools=function_calling) for conversation in conversations]
        requests = _with_adapters(requests, lora)
        return self._run(requests, sampling_params, use_tqdm, priority, schema, chat_template or "")

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
            dimensions: number of leading values to return of each vector; None: all.
            prompt_name: name of the checkpoint's prompt to put before each text; None: its default, "": none.
            truncate_prompt_tokens: truncate texts to this number of tokens, -1: to the model's max; None: refuse texts
                that are too long.
            lora: the name of an adapter; "" for the model alone.
            priority: smaller is more urgent.

        Raises PillionError of the first text that fails; an invalid field begins with ``inputs[n]``.
        """
        requests = _texts(prompts, lora, priority)
        vectors, cut_tokens = self._thread.cluster.vectors, truncate_prompt_tokens
        embed = vectors.embed(requests, dimensions=dimensions, prompt_name=prompt_name, cut_tokens=cut_tokens)
        result = self._wait_for(embed)
        return [
            EmbeddingRequestOutput(outputs=EmbeddingOutput(vector.tolist()), prompt_token_ids=list(ids))
            for vector, ids in zip(result.vectors, result.token_ids, strict=True)
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
        """Return a score per text of ``data_2``, in order, for how well it answers ``data_1``: the cosine of their
        embeddings, or a reranker's score.

        Args:
            data_1: one text, or one per text of ``data_2``.
            data_2: one text or a list.
            instruction: a reranker's criterion; None: its checkpoint's.
            truncate_prompt_tokens: truncate texts to this number of tokens, -1: to the model's max. A reranker's prompt
                is truncated within the text of ``data_2``.
            lora, priority: as in :meth:`embed`.

        Raises PillionError of the first pair that fails, and ValueError for lists of different length.
        """
        from pillion.gateway.pooling.pair_forms import TextPair

        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        first = first * len(second) if len(first) == 1 else first
        template = GenerateRequest(model=lora, priority=priority or 0)
        vectors = self._thread.cluster.vectors
        pairs = [TextPair(*pair) for pair in zip(first, second, strict=True)]
        scoring = vectors.score(pairs, template, instruction=instruction, cut_tokens=truncate_prompt_tokens)
        return [ScoringRequestOutput(outputs=ScoringOutput(score)) for score in self._wait_for(scoring).scores]

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
        classify = vectors.classify(requests, activated=use_activation, cut_tokens=truncate_prompt_tokens)
        result = self._wait_for(classify)
        return [
            ClassificationRequestOutput(outputs=ClassificationOutput(values.tolist()), labels=result.labels)
            for values in result.values
        ]

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the engine's thread and return its result. An exception here, e.g. Ctrl-C, cancels it."""
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
        defaults = self._thread.cluster.entry.sampling
        return EditableSamplingParams(**{field.name: getattr(defaults, field.name) for field in fields(SamplingParams)})

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, in_place: bool = False) -> ModelInfo:
        """Load the LoRA adapter in a folder, as PEFT writes it, as ``name`` for subsequent calls. Requires
        ``enable_lora=True``. With ``in_place``, it replaces an adapter of the same name. Raises PillionError with the
        reason why the adapter cannot be served."""
        self._require_adapters()
        gateway = self._thread.cluster.gateway
        folder = str(Path(path).expanduser().resolve())
        info: ModelInfo = self._wait_for(gateway.load_adapter(None, name, folder, in_place=in_place))
        return info

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter's name; running calls continue. Raises NotFound."""
        self._require_adapters()
        self._wait_for(self._thread.cluster.gateway.unload_adapter(None, name))

    def status(self) -> ClusterStatus:
        """Return the components, their load, and totals, like :meth:`pillion.Client.status`. Raises PillionError."""

        async def read() -> ClusterStatus:
            status: ClusterStatus = self._thread.cluster.gateway.status()
            return status

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

    def _require_adapters(self) -> None:
        if not self.flags.enable_lora:
            raise PermissionDenied("this LLM serves no adapters: make it as LLM(..., enable_lora=True)")

    def _load_lora_requests(
        self, lora_request: LoRARequest | Sequence[LoRARequest | None], lora: str | Sequence[str]
    ) -> str | list[str]:
        """Load the requested adapters that are not loaded yet; return the names of all, "" for none. Raises ValueError
        if ``lora`` names adapters, too."""
        if lora:
            raise ValueError("give one of lora and lora_request")
        requests = [lora_request] if isinstance(lora_request, LoRARequest) else list(lora_request)
        with self._lora_lock:
            for request in filter(None, requests):
                loaded_path = self._lora_paths.get(request.lora_name)
                if loaded_path != request.lora_path:
                    self.load_adapter(request.lora_name, request.lora_path, in_place=loaded_path is not None)
                    self._lora_paths[request.lora_name] = request.lora_path
        names = [request.lora_name if request else "" for request in requests]
        return names[0] if isinstance(lora_request, LoRARequest) else names

    def _with_seed(self, sampling: SamplingParams) -> SamplingParams:
        """Return the parameters with the next seed of the LLM's own, if it has any and they have none."""
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
        """Return the answers to all requests, in order. ``template``: chat template; "" for the model's own."""
        answers_schema = None if schema is None else answer_schema(schema)
        priorities = list(priority) if isinstance(priority, Sequence) else [priority or 0] * len(requests)
        if len(priorities) != len(requests):
            raise ValueError(f"{len(requests)} prompts and {len(priorities)} priorities: give one, or one for each")
        samplings = [self._with_seed(each) for each in one_each(sampling, {}, len(requests))]
        complete = [
            # Through the wire format, so that fields are converted, rounded and checked as in a gateway.
            request_from_pb(to_pb(replace(request, sampling=with_schema(each, answers_schema), priority=urgency)))
            for request, each, urgency in zip(requests, samplings, priorities, strict=True)
        ]
        done: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        work = self._thread.submit(_answer_all(self._thread.cluster, complete, done, answers_schema, template))
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
    __hash__ = None  # type: ignore[assignment]  # mutable, so not hashable


async def _answer_all(
    cluster: OfflineCluster,
    requests: Sequence[GenerateRequest],
    done: queue.SimpleQueue[tuple[int, RequestOutput] | None],
    schema: AnswerSchema | None,
    template: str,
) -> None:
    """Answer all requests, up to ``cluster.limit`` answers at once, and put each output with its index into ``done``. A
    nonempty ``template`` replaces the model's own. The first error cancels the other requests and is raised."""

    async def answer(index: int, request: GenerateRequest) -> None:
        try:
            entry = await entry_of(request)
            done.put((index, await _answer(cluster, request, schema, entry)))
        except Exception as error:  # noqa: BLE001  (it is raised again)
            failure = respelled(error, f"prompts[{index}]") if isinstance(error, PillionError) else error
            failure.add_note(f"prompt {index} of {len(requests)}")
            raise failure from None

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
    """Return the output of one request. ``entry``: the model with another chat template, or None."""
    parsed = None if schema is None else ParsedAnswers(schema.parse)
    runner = await cluster.gateway.generate(request, entry=entry)
    try:
        ids = list(runner.admitted.prompt)
        text = request.text or (cluster.prompt_text(ids) if request.messages else None)
        sampling = request.sampling
        prompt_logprobs = sampling.prompt_logprobs is not None
        collector = OutputCollector(text, ids, sampling.logprobs is not None, cluster.token_text, prompt_logprobs)
        async for delta in runner:
            collector.add(delta if parsed is None else parsed.note(delta))
        return collector.output()
    finally:
        runner.cancel()


def read_options(model: str, options: Mapping[str, Any]) -> OfflineFlags:
    """Convert options, Pillion's or vLLM's, to flags. Raises TypeError for an unknown option, ConfigError for an
    invalid value."""
    known = {field.name: field for field in fields(OfflineFlags) if field.name != "model"}
    flags: dict[str, Any] = {}
    for name, value in translate_options(str(model), options).items():
        if name not in known:
            raise TypeError(f"LLM has no option {name!r}; it has: {', '.join(sorted(known))}")
        about = known[name].metadata
        parse, expected = about["kind"], type(known[name].default)
        try:
            value = json.dumps(value) if isinstance(value, Mapping) else value
            if expected is tuple:
                value = (value,) if isinstance(value, str) else tuple(map(parse, value))
            value = parse(value) if isinstance(value, str) and parse is not bool else value
        except (ValueError, TypeError):
            raise ConfigError(f"{name} {value!r} is not of type {expected.__name__}") from None
        if type(value) is not expected and not (expected is float and type(value) is int):
            raise ConfigError(f"{name} {value!r} is not of type {expected.__name__}")
        if about["choices"] and value not in about["choices"]:
            raise ConfigError(f"{name} {value!r} is not one of {', '.join(about['choices'])}")
        flags[name] = value
    return OfflineFlags(model=str(model), **flags)


def _with_adapters(requests: list[GenerateRequest], lora: str | Sequence[str]) -> list[GenerateRequest]:
    """Return the requests with adapter ``lora``, or one of its names each. Raises ValueError for a wrong number of
    names."""
    names = [lora] * len(requests) if isinstance(lora, str) else list(lora)
    if len(names) != len(requests):
        raise ValueError(f"{len(requests)} prompts and {len(names)} adapters: give one, or one for each")
    return [replace(request, model=name) for request, name in zip(requests, names, strict=True)]


def _as_list(prompts: Any) -> Sequence[Any]:
    """Return a list of prompts; a single prompt (a text, a dict or token ids) becomes its only item."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def _texts(prompts: Any, lora: str, priority: int | None) -> list[GenerateRequest]:
    """Return the requests to embed or classify one text or many."""
    requests = (_request_of(prompt, f"prompts[{n}]") for n, prompt in enumerate(_as_list(prompts)))
    return [replace(request, model=lora, priority=priority or 0) for request in requests]


def _request_of(prompt: Any, where: str) -> GenerateRequest:
    """Return the request for one prompt. Raises InvalidRequest, with ``where`` as the path of the field."""
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
