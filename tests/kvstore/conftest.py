"""Fixtures of the KV store's tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from lab.testbed.conditions import WITHIN_S
from lab.testbed.redis import RedisServer, running_redis
from pillion.kvstore.exchange import peers
from pillion.kvstore.node import node_directory
from pillion.kvstore.pool_survival import keeper_client, surviving_pool
from pillion.kvstore.prefix_pins import pin_records
from pillion.kvstore.tiers.disk_tier import disk
from pillion.kvstore.transfer.nixl.nixl_plane import NixlPlane
from tests.support.patient_calls import patient_calls

# A machine that stands still for so long is broken.
PATIENT_S = WITHIN_S / 2


@pytest.fixture(autouse=True)
def patient_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Extend timeouts of nodes for each other, workers, disks and Redis, because a machine may stall for seconds,
    unless a test says otherwise."""
    monkeypatch.setattr(surviving_pool, "PATIENCE_S", PATIENT_S)
    monkeypatch.setattr(keeper_client, "KEEPER_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(peers, "STREAM_STALL_S", PATIENT_S)
    monkeypatch.setattr(node_directory, "TWIN_TIMEOUT_S", PATIENT_S)
    monkeypatch.setattr(pin_records, "RECORD_DEADLINE_MS", PATIENT_S * 1000)
    monkeypatch.setattr(disk, "LATE_S", PATIENT_S)
    monkeypatch.setitem(NixlPlane.__init__.__kwdefaults__, "stall_timeout_s", PATIENT_S)
    with patient_calls():
        yield


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Yield a folder with a short path, because a Unix socket's path is limited to about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="pillion-") as folder:
        yield folder
