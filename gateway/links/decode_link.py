"""One gRPC stream for all of this gateway's answers at a worker, with a batch of deltas per step. A decode worker runs
any answer, a prefill worker only those that end with a vector.

connecting --connected, hello sent--> alive --connection breaks--> every sink gets an error --> connecting
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc.aio

from pillion.errors import Overloaded, PillionError, Unavailable
from pillion.gateway.links.defects import Defects
from pillion.net import rpc
from pillion.tasks import end_tasks
from pillion.types import FinishReason, TokenLogprob
from pillion.v1 import decode_pb2, decode_pb2_grpc
from pillion.v1.decode_pb2 import DecodeError, DecodeTimings, Sibling, Submit
from pillion.wire.common import finish_from_pb, hello_to_pb, logprob_from_pb
from pillion.wire.registry import ComponentRecord


class DecodeDelta(NamedTuple):
    """Tokens of one stream since its previous delta; the last delta has a finish reason or an error.

    A tuple, because it takes a quarter of a frozen dataclass's time to create, and there is one per token of the
    cluster.
    """

    key: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: DecodeError | None = None
    timings: DecodeTimings | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    # Position in the worker's queue; 0 when the prompt's computation begins; None in other deltas.
    queued: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    pinned_blocks: int | None = None
    # Number of streams on the connection if it broke; 0 if the worker itself sent the error.
    broken: int = 0
    vector: bytes = b""


def batch_from_pb(message: decode_pb2.DecodeBatch) -> list[DecodeDelta]:
    return [
        _rich_delta_from_pb(delta)
        if delta.finish_reason
        or delta.logprobs
        or delta.prompt_logprobs
        or delta.HasField("timings")
        or delta.HasField("error")
        or delta.HasField("pinned_blocks")
        or not (token_ids := tuple(delta.token_ids))
        # Fast path: most deltas have only token ids.
        else DecodeDelta(delta.key, token_ids)
        for delta in message.deltas
    ]


def _rich_delta_from_pb(message: decode_pb2.DecodeDelta) -> DecodeDelta:
    return DecodeDelta(
        key=message.key,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_from_pb(message.finish_reason),
        error=message.error if message.HasField("error") else None,
        timings=message.timings if message.HasField("timings") else None,
        logprobs=tuple(map(logprob_from_pb, message.logprobs)),
        queued=message.queued.position if message.HasField("queued") else None,
        prompt_logprobs=tuple(map(logprob_from_pb, message.prompt_logprobs)),
        pinned_blocks=message.pinned_blocks if message.HasField("pinned_blocks") else None,
        vector=message.vector,
    )


log = logging.getLogger("pillion.gateway")

CONNECT_TIMEOUT_S = 5.0
RECONNECT_DELAY_S = 0.05
# Max unsent commands, one per started or cancelled stream; admission admits far fewer streams.
MAX_QUEUED_COMMANDS = 65_536

Sink = Callable[[DecodeDelta], None]


class DecodeLink:
    """A gateway's connection to one worker, which runs its streams. Sinks are called on the event loop and must not
    block."""

    def __init__(self, record: ComponentRecord, gateway_id: str) -> None:
        self.component_id = record.component_id
        self.address = record.address
        self._gateway_id = gateway_id
        self._channel = rpc.open_channel(record.address)
        self._stub = decode_pb2_grpc.DecodeStub(self._channel)
        self._commands: asyncio.Queue[decode_pb2.DecodeCommand] | None = None
        self._sinks: dict[int, Sink] = {}
        self._keys = itertools.count(1)
        self._defects = Defects(f"the connection to worker {self.component_id}")
        self._upkeep = asyncio.create_task(self._keep_connected(), name=f"connection to {self.component_id}")

    @property
    def alive(self) -> bool:
        """True if streams can be submitted."""
        return self._commands is not None

    def submit(self, submit: Submit, sinks: Sequence[Sink]) -> tuple[int, ...]:
        """Start a stream, and one per parallel sample; return their keys, which are set in ``submit``.

        ``sinks``, one per stream, get the streams' deltas, up to the first with a finish reason or an error, and none
        after ``cancel``. An error before the first token is sent to the first sink only, a lost connection to all.

        Raises Unavailable if the worker is not connected, and Overloaded if too many commands wait.
        """
        keys = tuple(next(self._keys) for _ in sinks)
        streams: list[Submit | Sibling] = [submit, *submit.siblings]
        for stream, key in zip(streams, keys, strict=True):
            stream.key = key
        self._send(decode_pb2.DecodeCommand(submit=submit))
        self._sinks.update(zip(keys, sinks, strict=True))
        return keys

    def cancel(self, key: int) -> None:
        """Cancel a stream; a no-op for one that has ended."""
        if self._sinks.pop(key, None) is None:
            return
        try:
            self._send(decode_pb2.DecodeCommand(cancel=decode_pb2.Cancel(key=key)))
        except PillionError as error:
            log.debug("cancel of a stream on %s: %s", self.component_id, error.message)

    async def aclose(self) -> None:
        """End the connection to the worker, which cancels its streams."""
        await end_tasks(self._upkeep)
        await self._channel.close()

    def _send(self, command: decode_pb2.DecodeCommand) -> None:
        if self._commands is None:
            raise Unavailable(f"worker {self.component_id} does not answer")
        try:
            self._commands.put_nowait(command)
        except asyncio.QueueFull:
            raise Overloaded(f"{MAX_QUEUED_COMMANDS} commands wait for worker {self.component_id}") from None

    async def _keep_connected(self) -> None:
        while True:
            reason, broke = "it closed the connection", False
            try:
                await self._serve()
            except TimeoutError:
                reason = f"no connection within {CONNECT_TIMEOUT_S:g} s"
            except grpc.aio.AioRpcError as error:
                reason, broke = error.details() or str(error.code()), True
            except asyncio.InvalidStateError:
                # A stopping worker closed the connection before our hello was written.
                reason = "it closed the connection at once"
            except PillionError as error:
                reason, broke = error.message, True
            except Exception as error:  # noqa: BLE001  (if this task ended, the worker would get no more requests)
                reason = f"a bug in this gateway: {error!r}"
                self._defects.note(error)
            finally:
                self._lose(reason, broke)
            await asyncio.sleep(RECONNECT_DELAY_S)

    async def _serve(self) -> None:
        # With wait_for_ready, connect as soon as a restarting worker listens.
        call = self._stub.Connect(wait_for_ready=True)
        commands: asyncio.Queue[decode_pb2.DecodeCommand] = asyncio.Queue(MAX_QUEUED_COMMANDS)
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.wait_for_connection()
                await call.write(decode_pb2.DecodeCommand(hello=hello_to_pb(self._gateway_id)))
            self._commands = commands
            writing = _write_all(call, commands, self._defects)
            writer = asyncio.create_task(writing, name=f"commands to {self.component_id}")
            async for batch in call:
                for delta in batch_from_pb(batch):
                    self._dispatch(delta)
        except asyncio.CancelledError as error:
            # A writer that fails cancels the call, which grpc.aio reports as a cancellation of this task.
            raise rpc.closed_under(error) from None
        finally:
            if writer is not None:
                writer.cancel()
            call.cancel()

    def _dispatch(self, delta: DecodeDelta) -> None:
        ended = delta.finish_reason is not None or delta.error is not None
        sink = self._sinks.pop(delta.key, None) if ended else self._sinks.get(delta.key)
        if sink is not None:
            sink(delta)

    def _lose(self, reason: str, broke: bool) -> None:
        """Send an error to all sinks. ``broke`` is True if neither side closed the connection properly."""
        self._commands = None
        sinks, self._sinks = self._sinks, {}
        if sinks:
            log.warning("worker %s lost with %d streams: %s", self.component_id, len(sinks), reason)
        for key, sink in sinks.items():
            message = f"worker {self.component_id} was lost: {reason}"
            error = DecodeError(code=Unavailable.code, message=message, retryable=True)
            sink(DecodeDelta(key=key, error=error, broken=len(sinks) if broke else 0))


async def _write_all(call: Any, commands: asyncio.Queue[decode_pb2.DecodeCommand], defects: Defects) -> None:
    """Write commands in order. Cancels the call if it fails; the task that reads deltas reports that."""
    try:
        while True:
            await call.write(await commands.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        call.cancel()
    except Exception as error:  # noqa: BLE001
        defects.note(error)
        call.cancel()
