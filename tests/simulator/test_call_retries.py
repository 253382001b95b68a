"""When a simulated channel sends a call again: as the SDK's service config says, and a server's pushback."""

from __future__ import annotations

from random import Random

import grpc
import grpc.aio
import pytest

from pillion.client.connection import (
    RETRY_ATTEMPTS,
    RETRY_FIRST_BACKOFF_S,
    RETRY_MAX_BACKOFF_S,
    service_config,
)
from pillion.errors import Overloaded, PillionError, Unavailable
from pillion.net.in_process import rpc_error
from pillion.simulator.call_retries import JITTER, RetryPolicy, RetryRules
from pillion.simulator.network import connection_error
from pillion.wire.errors import PUSHBACK

GET_STATUS = "/pillion.v1.Gateway/GetStatus"


def rules() -> tuple[RetryRules, RetryPolicy]:
    made = RetryRules([("grpc.service_config", service_config())], Random(1))
    policy = made.of(GET_STATUS)
    assert policy is not None
    return made, policy


def pause_after(made: RetryRules, policy: RetryPolicy, attempts: int, error: grpc.aio.AioRpcError) -> float | None:
    pushback = next((str(value) for key, value in error.trailing_metadata() or () if key == PUSHBACK), "")
    return made.pause_s(policy, attempts, error.code().name, pushback)


def test_a_lost_connection_is_tried_again_with_growing_pauses() -> None:
    made, policy = rules()
    pauses = [
        pause_after(made, policy, attempts, connection_error("gone")) for attempts in range(1, RETRY_ATTEMPTS + 1)
    ]
    assert pauses[-1] is None
    for attempts, pause_s in enumerate(pauses[:-1]):
        assert pause_s == pytest.approx(min(RETRY_FIRST_BACKOFF_S * 3**attempts, RETRY_MAX_BACKOFF_S), rel=JITTER)


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [(Unavailable("stopping", 100), 0.1), (Unavailable("no worker"), None), (Overloaded("full", 100), None)],
)
def test_a_server_says_when_and_whether(error: PillionError, pause_s: float | None) -> None:
    made, policy = rules()
    assert pause_after(made, policy, 1, rpc_error(error)) == pause_s


def test_a_flood_of_losses_is_not_answered_by_a_flood_of_retries() -> None:
    made, policy = rules()
    tried = [pause_after(made, policy, 1, connection_error("gone")) is not None for _ in range(100)]
    assert 0 < tried.index(False) <= 50
    assert not any(tried[tried.index(False) :])
    for _ in range(200):
        made.succeeded()
    assert pause_after(made, policy, 1, connection_error("gone")) is not None


def test_other_methods_and_channels_are_not_tried_again() -> None:
    assert rules()[0].of("/pillion.v1.Decode/Connect") is None
    assert RetryRules((), Random(1)).of(GET_STATUS) is None
    assert connection_error("gone").code() is grpc.StatusCode.UNAVAILABLE
