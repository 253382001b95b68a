"""A real S3 service (rclone's) behind a relay that disturbs its answers as networks and disks do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator

from lab.testbed.conditions import until
from lab.testbed.ports import free_port

KEY_ID, SECRET = "test-key-id", "test-secret"
BUCKET = "blocks"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}
# Shorter answers contain no block and are relayed unchanged.
_BODY_BYTES = 4096


class S3Service:
    """The service. ``trouble`` of requests from now on: "", "stall" (no answer), "503", "cut" (the connection ends in
    the middle of an object) or "flip" (one bit of an object changes)."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder / BUCKET
        self.trouble = ""
        self.requests = 0
        self._port = 0
        self._relays: set[asyncio.Task[None]] = set()

    def url(self, prefix: str = "kv") -> str:
        """Return the value of ``--object-url``."""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self.relay_port}"

    def direct_url(self, prefix: str = "kv") -> str:
        """Return the value of ``--object-url`` that bypasses the relay."""
        return f"s3://{BUCKET}/{prefix}?endpoint=http://127.0.0.1:{self._port}"

    def hang_up(self) -> None:
        """Close all connections, so that stalled requests fail and may be retried."""
        for relay in self._relays:
            relay.cancel()

    def objects(self) -> list[pathlib.Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[S3Service]:
        self.folder.mkdir(parents=True)
        # Bind the relay before choosing rclone's port, which it could take.
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.relay_port: int = server.sockets[0].getsockname()[1]
        self._port = free_port()
        program = pathlib.Path(sys.executable).parent / "rclone"
        argv = [str(program), "serve", "s3", "--addr", f"127.0.0.1:{self._port}", "--auth-key", f"{KEY_ID},{SECRET}"]
        # Tests remove objects without rclone; with no cache, rclone hangs on concurrent writes.
        argv += ["--dir-cache-time", "1s"]
        environ = {**os.environ, "HOME": str(self.folder.parent), "RCLONE_CONFIG": os.devnull}
        with (self.folder.parent.parent / "rclone.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *argv, self.folder.parent, stdout=log, stderr=log, env=environ
            )
        try:
            await until("rclone to serve", self._listens)
            yield self
        finally:
            server.close()
            self.hang_up()
            process.kill()
            await process.wait()

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, back, writer))
                group.create_task(self._answers(there, writer, back))
        except* OSError:
            pass
        except* asyncio.CancelledError:
            # asyncio would print an error for each connection that is cancelled at the end.
            pass
        finally:
            self._relays.discard(task)
            writer.close()

    async def _requests(
        self, reader: asyncio.StreamReader, back: asyncio.StreamWriter, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(2**16):
            self.requests += data.startswith((b"GET ", b"PUT "))
            if self.trouble == "stall":
                continue
            if self.trouble == "503":
                writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                writer.close()
                continue
            back.write(data)
            await back.drain()
        back.close()

    async def _answers(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        while data := await there.read(2**20):
            if len(data) > _BODY_BYTES and self.trouble == "cut":
                writer.write(data[: len(data) // 2])
                await writer.drain()
                writer.close()
                back.close()
                return
            if len(data) > _BODY_BYTES and self.trouble == "flip":
                data = data[:-100] + bytes([data[-100] ^ 16]) + data[-99:]
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.contextmanager
def s3_service(folder: pathlib.Path) -> Iterator[S3Service]:
    """Run the service for a block without an event loop, so it is reached directly, not through the relay."""
    os.environ.update(CREDENTIALS)
    service = S3Service(folder)
    with asyncio.Runner() as runner:
        running = service.running()
        runner.run(running.__aenter__())
        try:
            yield service
        finally:
            runner.run(running.__aexit__(None, None, None))
