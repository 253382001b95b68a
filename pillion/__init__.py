"""Pillion's SDK: the clients with their values and errors, and :class:`LLM`, which runs the engine in the caller's
process.

Importing it does not import torch or numpy. The clients and LLM are imported at their first use, because kernels and
engine import errors and types from here and also run without gRPC and OpenTelemetry.

    types.py, errors.py   values and errors of the public API; open them first
    client, offline       the clients; LLM
    tasks.py              asyncio tasks that run next to their owner
    near_names.py         suggestions for mistyped names
    config.py             every flag of every component
    settings              flags whose values have their own syntax
    rules                 what components must agree on about a request: the order of waiting, limits
    host                  what the processes of a machine share: cores, copies of adapters
    net                   servers, channels, TLS
    wire, v1              messages between components, and their generated code
    observability         metrics, traces, logs
    cli, supervisor       the command, and the processes that it starts
    loadgen, drill        `pillion bench`, `pillion drill`
    records               bundles of requests, and the commands that read them

The servers themselves (`gateway`, `prefill_service`, `decode_service`, `engine`, `kvstore`, `kernels`) are links to
folders at the root of the repository; only `cli`, `supervisor` and `offline` import them, inside functions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pillion._version import VERSION
from pillion.client.outputs import CompletionOutput, Logprob, RequestOutput
from pillion.errors import (
    Cancelled,
    ConfigError,
    Conflict,
    DeadlineExceeded,
    FieldViolation,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PillionError,
    QuotaViolation,
    Unauthenticated,
    Unavailable,
)
from pillion.types import (
    ChatMessage,
    ClusterStatus,
    ComponentStatus,
    Delta,
    FinishReason,
    ModelInfo,
    PinnedPrefix,
    SamplingParams,
    StructuredOutputs,
    TenantUsage,
    Timings,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolOptions,
    Usage,
    WarmedPrefix,
)

if TYPE_CHECKING:
    from pillion.client.async_client import AsyncClient
    from pillion.client.client import Client
    from pillion.offline.llm import LLM
    from pillion.offline.vllm_options import EngineArgs, LoRARequest
else:
    _LATE = {
        "AsyncClient": "pillion.client.async_client",
        "Client": "pillion.client.client",
        "EngineArgs": "pillion.offline.vllm_options",
        "LLM": "pillion.offline.llm",
        "LoRARequest": "pillion.offline.vllm_options",
    }

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_LATE[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})


__version__ = VERSION

__all__ = [
    "LLM",
    "AsyncClient",
    "Cancelled",
    "ChatMessage",
    "Client",
    "ClusterStatus",
    "CompletionOutput",
    "ComponentStatus",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Delta",
    "EngineArgs",
    "FieldViolation",
    "FinishReason",
    "Internal",
    "InvalidRequest",
    "LoRARequest",
    "Logprob",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PillionError",
    "PinnedPrefix",
    "QuotaViolation",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TenantUsage",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolOptions",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WarmedPrefix",
    "__version__",
]
