"""Private or undocumented names of libraries that Pillion relies on exist."""

from __future__ import annotations

import ast
import asyncio
import atexit
import importlib
import importlib.metadata
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import h11
import pytest
import torch
import uvicorn
from google.rpc import status_pb2
from grpc_status import rpc_status
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "lab/docs/library-internals.md"
FOLDERS = ("decode_service", "engine", "gateway", "kernels", "kvstore", "pillion", "prefill_service", "lab")
# Private only by name: documented, or of named tuples.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_make"}
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
READ = re.compile(r"\.(_[A-Za-z]\w*)")
DEFINED = re.compile(r"^ *(?:async )?(?:def |class |self\.)(_[A-Za-z]\w*)(?:\(|:| = )", re.MULTILINE)
# An attribute among several on the left of an assignment, or a field of a class.
STORED = re.compile(r"(?:^ +|\bself\.)(_[A-Za-z]\w*)(?=: |(?:, self\.\w+)* = )", re.MULTILINE)


async def _connection() -> H11Protocol:
    return H11Protocol(uvicorn.Config(app=lambda *_: None, log_config=None), ServerState(), {})


def connection() -> H11Protocol:
    """A connection as uvicorn makes it, for it sets its attributes only then."""
    return asyncio.run(_connection())


def cycle() -> RequestResponseCycle:
    """Return a request and its answer."""
    return RequestResponseCycle(*[h11.Connection(h11.SERVER)] * 10)


def failed_task() -> asyncio.Future[Any]:
    """Return a task that ended with an unretrieved exception."""

    async def fail() -> None:
        raise ValueError

    async def ended() -> asyncio.Future[Any]:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        return task

    task = asyncio.run(ended())
    assert task._log_traceback, f"asyncio: Task._log_traceback has another meaning, see {PAGE.name}"  # type: ignore[attr-defined]
    task.exception()
    assert not task._log_traceback, f"asyncio: Task._log_traceback has another meaning, see {PAGE.name}"  # type: ignore[attr-defined]
    return task


def gloo() -> Any:
    return pytest.importorskip("torch.distributed").ProcessGroupGloo


def interpreter() -> Any:
    return pytest.importorskip("triton.runtime.interpreter")


# Library, its description, how to obtain the object, and the names.
RELIED_ON: list[tuple[str, str, Callable[[], Any], tuple[str, ...]]] = [
    ("uvicorn", "H11Protocol", connection, ("client", "conn", "connections", "cycle", "limit_concurrency", "loop")),
    ("uvicorn", "H11Protocol", connection, ("on_response_complete", "send_400_response", "server_state", "transport")),
    ("uvicorn", "RequestResponseCycle", cycle, ("more_body", "response_complete")),
    ("uvicorn", "ServerState", ServerState, ("connections", "tasks")),
    (
        "uvicorn",
        "Server",
        lambda: uvicorn.Server(uvicorn.Config(lambda: None)),
        ("server_state", "should_exit", "started"),
    ),
    ("uvicorn", "Server", lambda: uvicorn.Server, ("capture_signals", "main_loop", "on_tick", "shutdown")),
    ("grpcio-status", "to_status()", lambda: rpc_status.to_status(status_pb2.Status()), ("_replace",)),
    ("python", "asyncio", lambda: asyncio, ("_set_running_loop",)),
    ("python", "Task", failed_task, ("_log_destroy_pending", "_log_traceback")),
    ("python", "threading", lambda: threading, ("_register_atexit", "_shutdown")),
    ("python", "atexit", lambda: atexit, ("_run_exitfuncs",)),
    ("torch", "torch", lambda: torch, ("_C", "_scaled_mm")),
    ("torch", "torch._C", lambda: torch._C, ("_construct_storage_from_data_pointer",)),
    ("torch", "ProcessGroupGloo", gloo, ("_Options",)),
    ("torch", "ProcessGroupGloo._Options()", lambda: gloo()._Options(), ("_devices", "_timeout")),
    ("torch", "torch.ops.aten", lambda: torch.ops.aten, ("_scaled_dot_product_flash_attention_for_cpu",)),
    (
        "torch",
        "torch.ops.mkldnn",
        lambda: torch.ops.mkldnn,
        ("_is_mkldnn_bf16_supported", "_linear_pointwise", "_reorder_linear_weight"),
    ),
    ("triton", "interpreter", interpreter, ("_LangPatchScope", "_patch_lang", "GridExecutor", "_get_np_dtype")),
    ("triton", "interpreter", interpreter, ("TensorHandle", "interpreter_builder", "interpreter_semantic")),
    ("triton", "_LangPatchScope()", lambda: interpreter()._LangPatchScope(), ("_changes",)),
    ("triton", "interpreter_semantic", lambda: interpreter().interpreter_semantic, ("binary_op_type_checking_impl",)),
    ("triton", "interpreter_semantic", lambda: interpreter().interpreter_semantic, ("broadcast_impl_value",)),
    ("triton", "core", lambda: interpreter().tl.core, ("_unwrap_if_constexpr", "block_type", "dtype", "tensor")),
    ("triton", "core", lambda: interpreter().tl.core, ("validate_block_shape",)),
    ("triton", "GridExecutor", lambda: interpreter().GridExecutor, ("_restore_args_dev",)),
    ("triton", "cache", lambda: pytest.importorskip("triton.runtime.cache"), ("triton_key",)),
    ("triton", "runtime.driver", lambda: pytest.importorskip("triton").runtime.driver, ("set_active",)),
    (
        "triton",
        "DependenciesFinder",
        lambda: pytest.importorskip("triton.runtime.jit").DependenciesFinder,
        ("_update_hash",),
    ),
    ("triton", "JITFunction", lambda: pytest.importorskip("triton.runtime.jit").JITFunction, ("cache_key",)),
    ("triton", "knobs.compilation", lambda: pytest.importorskip("triton").knobs.compilation, ("listener",)),
]


@pytest.mark.parametrize(
    ("library", "place", "find", "name"),
    [(library, place, find, name) for library, place, find, names in RELIED_ON for name in names],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_library_internals_in_use_exist(library: str, place: str, find: Callable[[], Any], name: str) -> None:
    found = find()
    version = "" if library == "python" else importlib.metadata.version(library)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    tested = next((pin for pin in pins if pin.startswith(f"{library}==")), "Python 3.11 to 3.13")
    assert hasattr(found, name), (
        f"{library} {version} has no {place}.{name} any more; it was there in {tested}: see lab/docs/{PAGE.name}"
    )
    assert f"`{place}.{name}`" in PAGE.read_text(), f"lab/docs/{PAGE.name} does not say what {place}.{name} is for"


def private_names() -> set[str]:
    """Private attributes that the product reads and does not define itself."""
    paths = {path.resolve() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    texts = [path.read_text() for path in paths if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))]
    used, defined = set(), set(DOCUMENTED)
    # Parsing all takes seconds; most names are defined in a line that begins with the definition.
    doubtful = {name for text in texts for name in READ.findall(text)}
    doubtful -= {name for text in texts for pattern in (DEFINED, STORED) for name in pattern.findall(text)}
    for text in texts:
        if doubtful.isdisjoint(PRIVATE.findall(text)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                stored = isinstance(node.ctx, ast.Store)
                (defined if own and stored else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
    return doubtful & used - defined


def test_no_unlisted_private_name_is_used() -> None:
    known = {name for _, _, _, names in RELIED_ON for name in names}
    assert private_names() - known == set(), f"a public way, or a row in RELIED_ON and in lab/docs/{PAGE.name}"
