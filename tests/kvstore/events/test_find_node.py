"""The KV node that ``pillion events`` follows, with and without a name."""

from __future__ import annotations

from typing import Any

import pytest

from pillion.cli.events_command import find_node
from pillion.client import client
from pillion.errors import ConfigError
from pillion.types import ClusterStatus, ComponentStatus


def nodes(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A gateway with KV nodes of these names."""
    known = tuple(ComponentStatus(component_id=name, role="kvnode", address=f"unix:/run/{name}.sock") for name in names)
    status = ClusterStatus(
        version="1",
        components=(ComponentStatus(component_id="decode-0", role="decode"), *known),
        active_requests=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        index_available=True,
    )

    class KnownCluster:
        def __init__(self, **reach: Any) -> None:
            assert reach == {"target": "here"}

        def __enter__(self) -> KnownCluster:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def status(self) -> ClusterStatus:
            return status

    monkeypatch.setattr(client, "Client", KnownCluster)


def test_the_only_node_of_a_cluster_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, "kvnode-0")
    assert find_node("", {"target": "here"}) == "unix:/run/kvnode-0.sock"
    assert find_node("kvnode-0", {"target": "here"}) == "unix:/run/kvnode-0.sock"
    with pytest.raises(ConfigError, match=r"'b' is not a KV node .*: kvnode-0 \(unix:/run/kvnode-0.sock\)"):
        find_node("b", {"target": "here"})
    nodes(monkeypatch, "a", "b")
    with pytest.raises(ConfigError, match=r"name the KV node to follow; .*: a \(unix:/run/a.sock\), b "):
        find_node("", {"target": "here"})
    assert find_node("b", {"target": "here"}) == "unix:/run/b.sock"
