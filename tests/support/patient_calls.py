"""Calls of KV nodes with the patience of a test, for what is not about a node that does not answer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from lab.testbed.conditions import WITHIN_S
from pillion.kvstore.client.node_client import NodeClient, call_unary


@contextlib.contextmanager
def patient_calls() -> Iterator[None]:
    """While it lasts, a call of a KV node from this process ends by a deadline only where its caller gives one.

    A machine that stands still for five seconds otherwise ends a worker's epoch, and with it all answers, or has a
    gateway release what a node has released.
    """
    with (
        mock.patch.object(call_unary, "__defaults__", (WITHIN_S,)),
        mock.patch.object(NodeClient.open_session, "__defaults__", (WITHIN_S,)),
    ):
        yield
