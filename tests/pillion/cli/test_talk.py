"""What `pillion status` says about the versions of a cluster's components."""

from __future__ import annotations

from pillion.cli.talk import MAX_NAMED, version_line
from pillion.types import ClusterStatus, ComponentStatus


def status_of(*components: tuple[str, str, int]) -> ClusterStatus:
    """A cluster of components by name, version and protocol."""
    shown = (
        ComponentStatus(component_id=name, role="decode", version=version, protocol=protocol)
        for name, version, protocol in components
    )
    return ClusterStatus(
        version="9.9",
        components=tuple(shown),
        active_requests=0,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        index_available=True,
    )


def test_differing_versions_are_listed_with_their_components() -> None:
    assert version_line(status_of(("a", "1.0", 8), ("b", "1.0", 8))) == "all components: 1.0, protocol 8"
    told = version_line(status_of(("b", "", 7), ("a", "1.0", 8), ("c", "1.0", 8)))
    assert told == "versions differ: 1.0, protocol 8: a, c; unknown version, protocol 7: b"
    # Two builds of one version may speak different protocols.
    assert version_line(status_of(("a", "1.0", 7), ("b", "1.0", 8))).startswith("versions differ: ")


def test_long_lists_are_cut() -> None:
    many = [(f"d{number}", "1.0", 8) for number in range(MAX_NAMED + 3)]
    assert version_line(status_of(("x", "2.0", 8), *many)).startswith(
        "versions differ: 1.0, protocol 8: d0, d1, d2, d3 and 3 more; 2.0"
    )


def test_a_gateway_without_versions_is_not_reported() -> None:
    assert version_line(status_of(("a", "", 0), ("b", "", 0))) == ""
