"""The SDK's blocking client, generated from async_client.py by `make client`: edit that file.

    from pillion import Client

    with Client("127.0.0.1:50051") as client:
        for delta in client.chat([{"role": "user", "content": "Hello!"}], max_tokens=64):
            print(delta.text, end="", flush=True)

Several answers to one prompt come mixed; ``delta.index`` says which answer a delta continues:

    texts = ["", "", ""]
    for delta in client.generate("Once upon a time", n=3, max_tokens=64):
        texts[delta.index] += delta.text

Many prompts at once, and their whole answers:

    for output in client.batch(["Once", "Twice"], max_tokens=64, concurrency=8, progress=True):
        print(output.outputs[0].text)

Leaving an iteration early (``break``, ``close()``, an exception) cancels the request, and the cluster frees everything
that worked for it. Errors are those of :mod:`pillion.errors`. A call made inside an OpenTelemetry span carries the
span's context to the gateway.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import trace

from pillion.client import client_requests, client_spans
from pillion.client.batch import DEFAULT_CONCURRENCY, Result, check_concurrency, one_each, run_batch
from pillion.client.client_requests import Item, Message, Prompt
from pillion.client.connection import Pem, connect
from pillion.net import rpc
from pillion.types import ClusterStatus, Delta, GenerateRequest, ModelInfo, SamplingParams
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from pillion.wire.public import delta_from_pb, model_from_pb, status_from_pb

DEFAULT_TARGET = "127.0.0.1:50051"
# For models() and status(); a stream takes as long as its caller allows.
UNARY_TIMEOUT_S = 10.0


class Client:
    """A blocking client of one gateway. Thread-safe; streams may run side by side.

    Args:
        target: ``host:port`` or ``unix:path`` of the gateway's gRPC port, ``grpcs://host:port`` for TLS.
        tls, ca, cert, key: TLS, the trusted authorities, and the client's own certificate; see
            :func:`pillion.client.connection.connect`.
        api_key: sent with every call; default: PILLION_API_KEY of the environment.
        max_message_bytes: largest message that is received or sent.

    Raises ConfigError for options that cannot work.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: bool = False,
        ca: Pem | None = None,
        cert: Pem | None = None,
        key: Pem | None = None,
        api_key: str = "",
        max_message_bytes: int = rpc.MAX_MESSAGE_BYTES,
    ) -> None:
        self._connection = connect(
            target, tls=tls, ca=ca, cert=cert, key=key, api_key=api_key, max_message_bytes=max_message_bytes
        )
        self._opening = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._gateway: Any = None

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Generator[Delta, None, None]:
        """Streams a completion of ``prompt``: text, or token ids.

        With ``n`` > 1 the deltas of all answers come mixed, each with its ``index``, and each answer's last one has a
        finish reason. With ``best_of`` > ``n`` everything comes at the end, the best answer as index 0. Usage and
        timings are in the very last delta.

        Args:
            model: served name; may be left out where one model is served.
            sampling: how tokens are chosen. Its fields may be given by keyword instead: ``temperature=0``.
            cache_salt: only requests with the same salt share KV.
            request_id: a label for logs and traces.
            priority: smaller is more urgent, from -100 to 100; a waiting request gains urgency with time.
            timeout_s: time for the whole stream; None for no limit.

        Raises:
            PillionError: one of its subclasses, from here or from the iteration.
            TypeError: an unknown keyword, or ``sampling`` and keywords together.
        """
        chosen = client_requests.sampling_of(sampling, fields)
        request = client_requests.prompt_request(
            prompt, model=model, sampling=chosen, cache_salt=cache_salt, request_id=request_id, priority=priority
        )
        return _deltas(self._call(request, timeout_s))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str = "",
        sampling: SamplingParams | None = None,
        cache_salt: str = "",
        request_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Generator[Delta, None, None]:
        """Streams the assistant's next message; ``messages`` as ChatMessage or as ``{"role": ..., "content": ...}``.

        Args:
            add_generation_prompt: end the prompt where that message begins; default: true, unless the last message is
                continued.
            continue_final_message: go on with the last message instead of beginning another one.
            chat_template_kwargs: further variables of the model's chat template, such as ``{"enable_thinking": False}``
                or ``{"reasoning_effort": "low"}``.

        The other arguments are those of :meth:`generate`.
        """
        chosen = client_requests.sampling_of(sampling, fields)
        options = client_requests.chat_options(add_generation_prompt, continue_final_message, chat_template_kwargs)
        request = client_requests.chat_request(
            messages,
            model=model,
            chat=options,
            sampling=chosen,
            cache_salt=cache_salt,
            request_id=request_id,
            priority=priority,
        )
        return _deltas(self._call(request, timeout_s))

    def batch(
        self,
        prompts: Sequence[Item],
        *,
        model: str = "",
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        progress: bool = False,
        raise_errors: bool = True,
        **fields: Any,
    ) -> list[Result]:
        """All answers to many prompts, in the prompts' order; ``concurrency`` prompts are in flight at once.

        Args:
            prompts: texts, token ids or conversations, mixed as you like.
            sampling: one for all prompts, or one for each.
            timeout_s: time for each prompt.
            progress: show a bar.
            raise_errors: the first error cancels the rest and is raised; else it stands in its prompt's place.

        A prompt that the gateway refuses for load (:class:`~pillion.errors.Overloaded`) is sent again after the time
        that the gateway names, up to :data:`pillion.client.batch.OVERLOAD_RETRIES` times.

        Raises:
            PillionError: of any prompt.
            ValueError: ``concurrency`` out of bounds, not one sampling for each prompt.
        """
        check_concurrency(concurrency)
        requests = [
            client_requests.item_request(prompt, model=model, sampling=each, cache_salt=cache_salt, priority=priority)
            for prompt, each in zip(prompts, one_each(sampling, fields, len(prompts)), strict=True)
        ]
        return run_batch(
            lambda request: self._call(request, timeout_s), _deltas, requests, concurrency, progress, raise_errors
        )

    def models(self) -> list[ModelInfo]:
        """Models that live workers serve. Raises PillionError."""
        reply = self._unary(self._stub().ListModels, gateway_pb2.ListModelsRequest())
        return [model_from_pb(model) for model in reply.models]

    def status(self) -> ClusterStatus:
        """The cluster's components, their load, and totals. Raises PillionError."""
        return status_from_pb(self._unary(self._stub().GetStatus, gateway_pb2.GetStatusRequest()))

    def close(self) -> None:
        """Ends the connection, and with it all streams of this client."""
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stub(self) -> Any:
        # The first call opens the channel; threads share it.
        with self._opening:
            if self._channel is None:
                self._channel = self._connection.open()
                self._gateway = gateway_pb2_grpc.GatewayStub(self._channel)
        return self._gateway

    def _call(self, request: GenerateRequest, timeout_s: float | None) -> Any:
        stub, span = self._stub(), client_spans.begin(request)
        with trace.use_span(span, end_on_exit=False):
            metadata = self._connection.metadata()
        call = stub.Generate(client_requests.to_pb(request), timeout=timeout_s, metadata=metadata)
        client_spans.end_with(span, call)
        return call

    def _unary(self, method: Any, message: Any) -> Any:
        try:
            return method(message, timeout=UNARY_TIMEOUT_S, metadata=self._connection.metadata())
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None


def _deltas(call: Any) -> Generator[Delta, None, None]:
    try:
        for message in call:
            yield delta_from_pb(message)
    except grpc.RpcError as error:
        raise rpc.from_rpc_error(error) from None
    finally:
        call.cancel()
