"""Flags that depend on what a machine has are settled once, before any component gets them."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from pillion.config import ServeFlags
from pillion.errors import ConfigError
from pillion.supervisor.local_cluster import process_specs, resolved_flags


def test_what_is_not_given_is_settled_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one process does prefill and decode, and the pool is what the GPU has left."""
    monkeypatch.setattr("pillion.engine.backends.devices.device_count", lambda: 1)
    flags = resolved_flags(ServeFlags(model="m"))
    assert (flags.device, flags.prefill_workers, flags.kv_pool_bytes) == ("cuda", 0, 0)
    assert "--kv-device=cuda" in process_specs(flags, pathlib.Path("/run/x"), None)[0].argv
    flags = resolved_flags(ServeFlags(model="m", prefill_workers=2, kv_pool_bytes=2**20))
    assert (flags.prefill_workers, flags.kv_pool_bytes) == (2, 2**20)
    flags = resolved_flags(ServeFlags(model="m", device="cpu"))
    assert (flags.device, flags.prefill_workers, flags.kv_pool_bytes) == ("cpu", 1, 2**30)
    assert "--kv-device=cpu" in process_specs(flags, pathlib.Path("/run/x"), None)[0].argv


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device": "cuda"}, "--device cuda: no NVIDIA GPU can be used here"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 needs a GPU"),
        ({"load_format": "dummy"}, "--load-format dummy needs a GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr("pillion.engine.backends.devices.device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=words):
        resolved_flags(ServeFlags(**flags))
