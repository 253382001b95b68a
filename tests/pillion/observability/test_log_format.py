"""The content of a component's log at each level."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, logging, sys
from pillion.observability.log_format import set_up_logging
set_up_logging(sys.argv[1])
import grpc.aio
async def call():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        logging.getLogger("pillion.gateway").debug("a line of ours")
        logging.getLogger("asyncio").debug("a line of asyncio's")
        logging.getLogger("urllib3.connectionpool").debug("a line of urllib3's")
        logging.getLogger("urllib3.connectionpool").warning("a warning of theirs")
asyncio.run(call())
"""


def lines(level: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, level], capture_output=True, text=True, check=True)
    return [line.split(": ", 1)[1] for line in done.stderr.splitlines()]


def test_debug_level_applies_only_to_our_own_loggers() -> None:
    assert lines("debug") == ["a line of ours", "a warning of theirs"]
    assert lines("info") == ["a warning of theirs"]
    assert lines("error") == []


BROKEN_CALLS = """
import asyncio, gc, logging, sys
from pillion.observability.log_format import set_up_logging
set_up_logging("info")
import grpc.aio
from grpc._cython.cygrpc import ExecuteBatchError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pillion.net.rpc import ErrorInterceptor, component_options

class Health(health_pb2_grpc.HealthServicer):
    async def Check(self, request, context):
        called.set()
        raise ExecuteBatchError('Failed "execute_batch":\\nmore of it')
    async def Watch(self, request, context):
        raise KeyError("a defect")
        yield

async def main():
    global called
    called = asyncio.Event()
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    request = health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=component_options()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(request)
        await called.wait()
        call.cancel()
        try:
            await stub.Watch(request).read()
        except grpc.aio.AioRpcError:
            pass
    await server.stop(0)
    async with grpc.aio.insecure_channel("unix:/missing", options=component_options()) as channel:
        async def dropped():
            await health_pb2_grpc.HealthStub(channel).Check(request)
        task = asyncio.create_task(dropped())
        await asyncio.wait([task])
        del task
        gc.collect()

asyncio.run(main())
"""


def test_a_disconnected_call_logs_one_line() -> None:
    """A library's own report of it has no traceback; a defect has one."""
    done = subprocess.run([sys.executable, "-c", BROKEN_CALLS], capture_output=True, text=True, check=True)
    gone, *defect, dropped = done.stderr.splitlines()
    assert " WARNING grpc._cython.cygrpc: ExecuteBatchError raised in core by servicer method [/grpc.health" in gone
    assert gone.endswith('Check]: Failed "execute_batch":')
    assert " WARNING asyncio: Task exception was never retrieved: failed to connect to all addresses; " in dropped
    assert defect[0].endswith("pillion.wire.errors: /grpc.health.v1.Health/Watch failed")
    assert defect[1].startswith("Traceback")
    assert defect[-1] == "KeyError: 'a defect'"
    assert done.stderr.count("Traceback") == 1
