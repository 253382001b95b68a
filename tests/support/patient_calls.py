"""Calls of KV nodes with test timeouts, for tests that do not concern unresponsive nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from lab.testbed.conditions import WITHIN_S
from pillion.kvstore.client.node_client import NodeClient, call_unary


@contextlib.contextmanager
def patient_calls() -> Iterator[None]:
    """Disable the default deadline of calls to KV nodes from this process; callers' own remain.

    Otherwise a stall of five seconds ends a worker's epoch, and with it all answers, or makes a gateway release blocks.
    """
    with (
        mock.patch.object(call_unary, "__defaults__", (WITHIN_S,)),
        mock.patch.object(NodeClient.open_session, "__defaults__", (WITHIN_S,)),
    ):
        yield
