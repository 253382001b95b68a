"""The SDK's blocking client, generated from async_client.py by `make client`: edit that file.

    from pillion import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.chat([{"role": "user", "content": "Hello!"}], max_tokens=64):
            print(delta.text, end="", flush=True)

Several answers to one prompt are interleaved; ``delta.index`` is the answer that a delta continues:

    texts = ["", "", ""]
    for delta in client.generate("Once upon a time", n=3, max_tokens=64):
        texts[delta.index] += delta.text

Many prompts at once, and their whole answers:

    for output in client.batch(["Once", "Twice"], max_tokens=64, concurrency=8, progress=True):
        print(output.outputs[0].text)

If a gateway dies during a stream, the stream resumes after its last token, at the next of several addresses
(``Client("host1:50051,host2:50051")``) or at the same one: :mod:`pillion.client.resume`.

Leaving an iteration early (``break``, ``close()``, an exception) cancels the request and frees its resources in the
cluster. Errors are those of :mod:`pillion.errors`. A call inside an OpenTelemetry span sends the span's context to the
gateway.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import trace

from pillion.client import client_requests, client_spans
from pillion.client.answer_schema import AnswerSchema, Schema, answer_schema, with_schema
from pillion.client.batch import DEFAULT_CONCURRENCY, Result, check_concurrency, one_each, run_batch
from pillion.client.client_requests import Item, Message, Prompt
from pillion.client.connection import Pem, connect
from pillion.client.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
from pillion.client.resume import CONNECT_TIMEOUT_S, RESUME_TIMEOUT_S, StreamProgress, is_loss, should_retry
from pillion.errors import Cancelled, DeadlineExceeded, PillionError
from pillion.net import rpc
from pillion.types import (
    ClusterStatus,
    Delta,
    GenerateRequest,
    ModelInfo,
    PinnedPrefix,
    SamplingParams,
    Tool,
    Value,
    WarmedPrefix,
)
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import model_from_pb, pin_from_pb, status_from_pb, warmed_from_pb

DEFAULT_TARGET = "127.0.0.1:50051"
UNARY_TIMEOUT_S = 10.0
# Timeout of long calls: an adapter may have gigabytes to copy, verify and distribute; a prefix is computed after all
# other requests; a call for embeddings or scores may have 2,048 long texts.
LONG_CALL_TIMEOUT_S = 600.0


class Client:
    """Blocking client of a cluster. Thread-safe; streams may run concurrently.

    Args:
        target: ``host:port`` or ``unix:path`` of a gateway's gRPC port, ``grpcs://host:port`` for TLS. Several gateways
            as a list, or separated by commas: the first one is called, after its loss the next one.
        tls, ca, cert, key: TLS, the trusted authorities, and the client's own certificate; see
            :func:`pillion.client.connection.connect`.
        api_key: sent with every call; default: PILLION_API_KEY of the environment.
        max_message_bytes: limit of sent and received messages.
        resume_timeout_s: time for a stream to resume after the loss of its gateway; 0: never resume.
        connect_timeout_s: time that a request may wait for a gateway to listen; 0: a few tries within a second. A
            shorter ``timeout_s`` of the request ends it first.
        plan: forced on every request, with an operator's key; see :func:`pillion.client.connection.connect`.

    Raises ConfigError for incompatible options.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        tls: bool = False,
        ca: Pem | None = None,
        cert: Pem | None = None,
        key: Pem | None = None,
        api_key: str = "",
        max_message_bytes: int = rpc.MAX_MESSAGE_BYTES,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        plan: str = "",
    ) -> None:
        self._connection = connect(
            target, tls=tls, ca=ca, cert=cert, key=key, api_key=api_key, max_message_bytes=max_message_bytes, plan=plan
        )
        self._resume_timeout_s, self._connect_timeout_s = resume_timeout_s, connect_timeout_s
        self._opening = threading.Lock()
        self._channels: dict[int, tuple[grpc.Channel, Any]] = {}
        self._address_index = 0
        self._closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int | None = 0,
        timeout_s: float | None = None,
        schema: Schema[Value] | None = None,
        **fields: Any,
    ) -> Generator[Delta[Value], None, None]:
        """Stream a completion of ``prompt``: text, or token ids.

        With ``n`` > 1 the deltas of all answers are interleaved, each with its ``index``, and each answer's last one
        has a finish reason. With ``best_of`` > ``n`` everything comes at the end, the best answer as index 0. Usage and
        timings are in the very last delta.

        Args:
            model: served name; optional if only one model is served.
            sampling: sampling parameters; alternatively its fields as keywords: ``temperature=0``.
            cache_salt: only requests with the same salt share KV.
            request_id: a label for logs and traces.
            priority: smaller is more urgent, from -100 to 100; a waiting request gains urgency with time.
            timeout_s: timeout of the whole stream; None for none.
            schema: makes every answer JSON that fits it: a JSON schema as a mapping or as text, or a type (a dataclass,
                a TypedDict, a pydantic model, a msgspec struct, or a builtin type made of them). The last delta of an
                answer has the value as ``parsed``: an object of that type, or JSON's value in Python. It is None for an
                answer cut short by ``max_tokens`` or a stop string.

        Raises:
            PillionError: one of its subclasses, from here or from the iteration.
            TypeError: an unknown keyword, ``sampling`` and keywords together, or a type without a schema.
        """
        structured = None if schema is None else answer_schema(schema)
        chosen = with_schema(client_requests.sampling_of(sampling, fields), structured)
        request = client_requests.prompt_request(
            prompt, model=model, sampling=chosen, cache_salt=cache_salt, request_id=request_id, priority=priority or 0
        )
        return self._stream(request, timeout_s, structured).deltas()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int | None = 0,
        timeout_s: float | None = None,
        schema: Schema[Value] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "",
        parallel_tool_calls: bool | None = None,
        **fields: Any,
    ) -> Generator[Delta[Value], None, None]:
        """Stream the assistant's next message; ``messages`` as ChatMessage or as ``{"role": ..., "content": ...}``.

        Args:
            add_generation_prompt: end the prompt where that message begins; default: true, unless the last message is
                continued.
            continue_final_message: continue the last message instead of beginning another one.
            chat_template_kwargs: more variables of the model's chat template, e.g. ``{"enable_thinking": False}`` or
                ``{"reasoning_effort": "low"}``.
            tools: tools that the model may call, in OpenAI's form or as :class:`pillion.Tool`; calls come in
                ``delta.tool_calls``.
            tool_choice: "auto" (the default), "none", "required", or the name of the tool that must be called.
            parallel_tool_calls: allow several tool calls per answer; default: true.

        The other arguments are those of :meth:`generate`.
        """
        structured = None if schema is None else answer_schema(schema)
        chosen = with_schema(client_requests.sampling_of(sampling, fields), structured)
        options = client_requests.chat_options(add_generation_prompt, continue_final_message, chat_template_kwargs)
        request = client_requests.chat_request(
            messages,
            model=model,
            chat=options,
            tools=client_requests.tool_options(tools, tool_choice, parallel_tool_calls),
            sampling=chosen,
            cache_salt=cache_salt,
            request_id=request_id,
            priority=priority or 0,
        )
        return self._stream(request, timeout_s, structured).deltas()

    def batch(
        self,
        prompts: Sequence[Item],
        *,
        model: str = "",
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str = "",
        priority: int | None = 0,
        timeout_s: float | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool = False,
        raise_errors: bool = True,
        schema: Schema[Value] | None = None,
        **fields: Any,
    ) -> list[Result[Value]]:
        """Return all answers to many prompts, in order, with ``concurrency`` prompts in flight at once.

        Args:
            prompts: texts, token ids or conversations, freely mixed.
            sampling: one for all prompts, or one per prompt.
            timeout_s: time for each prompt.
            progress: show a bar.
            raise_errors: let the first error cancel the rest and raise it; else it is its prompt's result.
            schema: as in :meth:`generate`; an answer's value is its ``parsed``.

        A prompt that the gateway refuses for load (:class:`~pillion.errors.Overloaded`) is retried after the time that
        the gateway names, up to :data:`pillion.client.batch.OVERLOAD_RETRIES` times.

        Raises:
            PillionError: of any prompt.
            ValueError: ``concurrency`` out of range, or a wrong number of samplings.
        """
        check_concurrency(concurrency)
        structured = None if schema is None else answer_schema(schema)
        chosen = [with_schema(each, structured) for each in one_each(sampling, fields, len(prompts))]
        requests = [
            client_requests.item_request(
                prompt, model=model, sampling=each, cache_salt=cache_salt, priority=priority or 0
            )
            for prompt, each in zip(prompts, chosen, strict=True)
        ]
        return run_batch(
            lambda request: self._stream(request, timeout_s, structured),
            _BlockingStream.deltas,
            requests,
            concurrency,
            progress,
            raise_errors,
        )

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        model: str = "",
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int | None = 0,
        timeout_s: float = LONG_CALL_TIMEOUT_S,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of one text or up to 2,048, in order, as the checkpoint's sentence-transformers files
        specify.

        Args:
            inputs: one or a list: texts, or token ids.
            dimensions: number of leading values of each vector to return; None: all.
            prompt_name: which of the checkpoint's prompts precedes each text; None: its default, "": none.
            truncate_prompt_tokens: truncate texts to this number of tokens, -1: to the model's max; None: refuse texts
                that are too long.
            model, cache_salt, request_id, priority: as in :meth:`generate`.
            timeout_s: time for the whole call.

        Raises PillionError of the first text that fails; an invalid field begins with ``inputs[n]``.
        """
        message = client_requests.embed_message(
            inputs,
            model=model,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            cache_salt=cache_salt,
            request_id=request_id,
            priority=priority or 0,
        )
        reply = self._unary("Embed", message, timeout_s)
        return [
            EmbeddingRequestOutput(outputs=EmbeddingOutput(list(one.values)), prompt_token_ids=list(one.token_ids))
            for one in reply.embeddings
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        model: str = "",
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        max_tokens_per_doc: int = 0,
        cache_salt: str = "",
        request_id: str = "",
        priority: int | None = 0,
        timeout_s: float = LONG_CALL_TIMEOUT_S,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document answers the query, in the documents' order: a cosine of vectors, or a
        reranker's score.

        Args:
            queries: one text, or one per document.
            documents: one text or a list, at most 2,048.
            instruction: a reranker's criterion; None: its checkpoint's.
            truncate_prompt_tokens: as in :meth:`embed`; where a pair is one text, its document is truncated.
            max_tokens_per_doc: truncate documents to this number of tokens; 0: do not.
            model, cache_salt, request_id, priority: as in :meth:`generate`.
            timeout_s: time for the whole call.

        Raises PillionError of the first pair that fails; an invalid field begins with ``inputs[n]``.
        """
        texts = [[one] if isinstance(one, str) else list(one) for one in (queries, documents)]
        message = client_requests.made(
            gateway_pb2.ScoreRequest,
            queries=texts[0],
            documents=texts[1],
            model=model,
            instruction=instruction,
            truncate_prompt_tokens=truncate_prompt_tokens,
            max_tokens_per_doc=max_tokens_per_doc,
            cache_salt=cache_salt,
            request_id=request_id,
            priority=priority or 0,
        )
        reply = self._unary("Score", message, timeout_s)
        return [ScoringRequestOutput(outputs=ScoringOutput(score)) for score in reply.scores]

    def models(self) -> list[ModelInfo]:
        """Return the models that live workers serve. Raises PillionError."""
        reply = self._unary("ListModels", gateway_pb2.ListModelsRequest())
        return [model_from_pb(model) for model in reply.models]

    def load_adapter(self, name: str, path: str, *, in_place: bool = False, model: str = "") -> ModelInfo:
        """Name the LoRA adapter in a folder on the gateway's machine, for subsequent requests at all gateways. Requires
        an operator's key.

        Args:
            name: what requests then pass as their model.
            path: the folder, as PEFT writes it, inside one of the gateway's --lora-path.
            in_place: allow a name that another adapter has, which then loses it.
            model: the adapter's model; "" for that of --model.

        Raises:
            PillionError: with the reason why the adapter cannot be served, or may not be loaded.
        """
        request = gateway_pb2.LoadAdapterRequest(name=name, path=path, in_place=in_place, model=model)
        return model_from_pb(self._unary("LoadAdapter", request, LONG_CALL_TIMEOUT_S))

    def unload_adapter(self, name: str) -> None:
        """Remove the name of a LoRA adapter; running answers continue. Requires an operator's key. Raises NotFound, and
        PillionError if it may not be unloaded."""
        self._unary("UnloadAdapter", gateway_pb2.UnloadAdapterRequest(name=name))

    def warm_prefix(
        self,
        prompt: Item,
        *,
        pin: bool = False,
        name: str = "",
        ttl_s: int = 0,
        model: str = "",
        cache_salt: str = "",
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float = LONG_CALL_TIMEOUT_S,
    ) -> WarmedPrefix:
        """Compute the KV of a prompt ahead, after all other requests, without generating. Later prompts that begin with
        it hit the cache.

        Args:
            prompt: text, token ids, or a conversation, which is rendered without the beginning of an answer.
            pin: evict it from its node's pool after everything that is not pinned.
            name: the pin's name; an existing name gets the new prompt. "": derived from the prompt.
            ttl_s: duration of the pin, up to 30 days. 0: a day.
            model, cache_salt, tools, chat_template_kwargs: as in the requests that are to hit it.
            timeout_s: time for the whole call.

        Raises:
            PillionError: Overloaded if the pin exceeds a quota; the prompt has been computed nevertheless.
        """
        request = client_requests.prefix_request(
            prompt, model=model, cache_salt=cache_salt, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        asked = client_requests.to_pb(request)
        message = client_requests.made(gateway_pb2.WarmPrefixRequest, prompt=asked, pin=pin, name=name, ttl_s=ttl_s)
        return warmed_from_pb(self._unary("WarmPrefix", message, timeout_s))

    def prefixes(self) -> list[PinnedPrefix]:
        """Return the caller's own pins, by name. Raises PillionError."""
        reply = self._unary("ListPrefixes", gateway_pb2.ListPrefixesRequest())
        return [pin_from_pb(pin) for pin in reply.pins]

    def drop_prefix(self, name: str) -> None:
        """End one of the caller's own pins; its blocks stay until they are evicted. Raises NotFound."""
        self._unary("DropPrefix", gateway_pb2.DropPrefixRequest(name=name))

    def status(self) -> ClusterStatus:
        """Return the cluster's components, their load, and totals. Raises PillionError."""
        return status_from_pb(self._unary("GetStatus", gateway_pb2.GetStatusRequest()))

    def close(self) -> None:
        """Close the connection, which ends all streams of this client."""
        with self._opening:
            self._closed = True
            opened = tuple(self._channels.values())
        for channel, _ in opened:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(
        self, request: GenerateRequest, timeout_s: float | None, schema: AnswerSchema | None
    ) -> _BlockingStream:
        addresses = len(self._connection.targets)
        limits_s = (timeout_s, self._resume_timeout_s, self._connect_timeout_s)
        progress = StreamProgress(request, *limits_s, addresses, time.monotonic(), schema)
        return _BlockingStream(self, progress)

    def _stub(self) -> tuple[int, Any]:
        """Return the index of the current address, and its stub."""
        # Opened by the first call; threads share it.
        with self._opening:
            if self._closed:
                raise Cancelled("the client is closed")
            if self._address_index not in self._channels:
                channel = self._connection.open(self._address_index)
                self._channels[self._address_index] = channel, gateway_pb2_grpc.GatewayStub(channel)
            return self._address_index, self._channels[self._address_index][1]

    def _channel(self) -> grpc.Channel:
        """Return the channel of the current address."""
        number, _ = self._stub()
        return self._channel_of(number)

    def _channel_of(self, number: int) -> grpc.Channel:
        return self._channels[number][0]

    def _switch_address(self, number: int) -> None:
        """Switch to the next address, unless another call has done so."""
        with self._opening:
            if self._address_index == number:
                self._address_index = (number + 1) % len(self._connection.targets)

    def _drop_channel(self, number: int) -> None:
        """Drop the channel to an address, so that the next call opens a new one. After Ctrl-C, a blocking call may hold
        a lock of gRPC for ever, on which the channel's other calls would hang. Streams in flight keep the old channel:
        closing it would end them."""
        with self._opening:
            self._channels.pop(number, None)

    def _call(self, request: GenerateRequest, timeout_s: float | None) -> tuple[int, Any]:
        (number, stub), span = self._stub(), client_spans.begin(request)
        with trace.use_span(span, end_on_exit=False):
            metadata = self._connection.metadata()
        try:
            call = stub.Generate(client_requests.to_pb(request), timeout=timeout_s, metadata=metadata)
        except KeyboardInterrupt:
            self._drop_channel(number)
            raise
        client_spans.end_with(span, call)
        return number, call

    def _unary(self, name: str, message: Any, timeout_s: float = UNARY_TIMEOUT_S) -> Any:
        for sent in itertools.count(1):
            number, stub = self._stub()
            try:
                method = getattr(stub, name)
                return method(message, timeout=timeout_s, metadata=self._connection.metadata())
            except KeyboardInterrupt:
                self._drop_channel(number)
                raise
            except grpc.RpcError as error:
                failure, by_gateway = rpc.from_rpc_error(error), rpc.said_by_server(error)
                if not should_retry(failure, by_gateway, sent, len(self._connection.targets)):
                    raise self._connection.explained(failure, failure, by_gateway, number) from None
                self._switch_address(number)
        raise AssertionError("the last call returns or raises")


class _BlockingStream:
    """One request's stream, over all its calls; the constructor makes the first call."""

    def __init__(self, client: Client, progress: StreamProgress) -> None:
        self._client = client
        self._progress = progress
        self._ended = threading.Event()
        self._start_call()

    def deltas(self) -> Generator[Delta, None, None]:
        """Yield all deltas, in order. Raises PillionError."""
        progress = self._progress
        try:
            while True:
                try:
                    for message in self._current:
                        yield progress.accept(message)
                    return
                except grpc.RpcError as error:
                    failure = client_requests.respelled(rpc.from_rpc_error(error))
                    by_gateway = rpc.said_by_server(error)
                if progress.over:
                    return
                if self._ended.is_set() or self._client._closed:
                    raise failure
                try:
                    pause_s = progress.delay_s(failure, by_gateway, self._connected(), time.monotonic())
                except PillionError as final:
                    connection = self._client._connection
                    # The caller's timeout, which says nothing about the connection.
                    by_gateway = by_gateway or isinstance(failure, DeadlineExceeded)
                    raise connection.explained(final, failure, by_gateway, self._address_index) from None
                if is_loss(failure, by_gateway):
                    self._client._switch_address(self._address_index)
                self._client._connection.pause(self._client._channel(), pause_s, self._ended)
                self._start_call()
        except KeyboardInterrupt:
            self._client._drop_channel(self._address_index)
            raise
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the stream; its reader gets Cancelled."""
        self._ended.set()
        self._current.cancel()

    def _connected(self) -> bool:
        """Return whether the last call had a connection: the channel was ready, or has not failed to connect since."""
        return self._started_connected or self._state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE

    def _state(self) -> grpc.ChannelConnectivity:
        return self._client._connection.state(self._client._channel_of(self._address_index))

    def _start_call(self) -> None:
        progress = self._progress
        self._address_index, self._current = self._client._call(
            progress.request(), progress.timeout_s(time.monotonic())
        )
        self._started_connected = self._state() is grpc.ChannelConnectivity.READY
        if self._ended.is_set():
            self._current.cancel()
