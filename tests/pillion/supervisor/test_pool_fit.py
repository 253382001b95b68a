"""The smallest pool that works, and the one-line errors of pools that do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pillion.config import ServeFlags
from pillion.errors import ConfigError
from pillion.supervisor import pool_fit as fit
from pillion.supervisor.pool_fit import PoolFit, fit_pool, human_bytes

POOL = ServeFlags(kv_pool_bytes=2**30, block_size=16, max_model_len=8192)


def fitted(flags: ServeFlags, reserve_percent: int = 10) -> PoolFit:
    """The pool of blocks of 256 KiB, for a model of 8,192 tokens and one decode worker."""
    return fit_pool(flags, 2**18, flags.max_model_len or 8192, 1, reserve_percent=reserve_percent)


def test_the_pool_size_is_converted_to_tokens() -> None:
    assert fitted(POOL) == PoolFit(65536, 8192, 0)


@pytest.mark.parametrize("reserve", [0, 10, 50, 90])
def test_a_too_small_pool_names_the_required_size(reserve: int) -> None:
    small = replace(POOL, kv_pool_bytes=2**26)
    with pytest.raises(ConfigError) as caught:
        fitted(small, reserve)
    assert "\n" not in caught.value.message
    found = re.search(r"at least (\d+) bytes", caught.value.message)
    assert found
    enough = int(found[1])
    fitted(replace(small, kv_pool_bytes=enough), reserve)
    with pytest.raises(ConfigError):
        fitted(replace(small, kv_pool_bytes=int(enough * 0.9)), reserve)


@pytest.mark.parametrize("megabytes", [24, 40, 100, 200, 400])
def test_the_default_length_is_limited_by_the_pool(megabytes: int) -> None:
    unasked = replace(POOL, kv_pool_bytes=megabytes * 2**20, max_model_len=0)
    made = fitted(unasked)
    assert fitted(replace(unasked, max_model_len=made.max_model_len_tokens // 16 * 16)) == made
    if made.max_model_len_tokens < 8192:
        with pytest.raises(ConfigError):
            fitted(replace(unasked, max_model_len=made.max_model_len_tokens + 16))


def test_a_pool_too_small_for_any_length_is_rejected() -> None:
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        fitted(replace(POOL, kv_pool_bytes=16 * 2**20, max_model_len=0))


def test_a_pool_larger_than_the_machine_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "machine_bytes", lambda: 2**29)
    with pytest.raises(ConfigError, match="is more than this machine's memory, 512 MiB"):
        fitted(POOL)


def test_the_pool_must_leave_memory_for_the_largest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "machine_bytes", lambda: 2**30)
    fit_pool(POOL, 2**18, 8192, 1, 2**30 - POOL.kv_pool_bytes)
    with pytest.raises(
        ConfigError, match=r"and the workers' largest steps, .* are more than this machine's memory, 1 GiB"
    ):
        fit_pool(POOL, 2**18, 8192, 1, 2**30 - POOL.kv_pool_bytes + 1)


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**30, 2**41)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
        "2 TiB",
    ]
