"""Places of uploads: a few at a time for each tenant, and none that drips keeps others out."""

from __future__ import annotations

from pillion.gateway.batches.upload_places import (
    GRACE_S,
    MAX_UPLOADS,
    MIN_BYTES_PER_S,
    TENANT_UPLOADS,
    YIELD_BYTES_PER_S,
    YIELD_S,
    UploadPlace,
    UploadPlaces,
)


class Uploads:
    """The places of a gateway, and who has lost one."""

    def __init__(self) -> None:
        self.places = UploadPlaces()
        self.lost: list[str] = []

    def begin(self, tenant: str, now_s: float, called: str = "") -> UploadPlace | None:
        return self.places.begin(tenant, now_s, lambda: self.lost.append(called))


def test_a_tenant_and_all_of_them_have_so_many() -> None:
    uploads = Uploads()
    mine = [uploads.begin("a", 0) for _ in range(TENANT_UPLOADS)]
    assert uploads.begin("a", YIELD_S / 2) is None
    others = [uploads.begin(f"b{n}", 0) for n in range(MAX_UPLOADS - TENANT_UPLOADS)]
    assert None not in (*mine, *others)
    assert uploads.begin("c", YIELD_S / 2) is None
    assert others[0] is not None
    uploads.places.end(others[0])
    assert uploads.begin("c", YIELD_S / 2) is not None
    assert uploads.lost == []


def test_the_slowest_of_the_tenant_gives_its_place_to_a_newcomer() -> None:
    uploads = Uploads()
    drips = [uploads.begin("a", 0, f"a{n}") for n in range(TENANT_UPLOADS)]
    stranger = uploads.begin("b", 0, "b")
    for n, place in enumerate(drips):
        assert place is not None
        place.size_bytes = 1 + (n + 2) % TENANT_UPLOADS
    assert stranger is not None
    assert uploads.begin("a", YIELD_S) is not None
    assert uploads.lost == ["a2"]
    assert drips[2] is not None
    assert drips[2].lost
    # It gives back what it has no more.
    uploads.places.end(drips[2])
    assert uploads.begin("a", YIELD_S) is not None
    assert uploads.lost == ["a2", "a3"]


def test_who_comes_fast_enough_keeps_the_place() -> None:
    uploads = Uploads()
    for _ in range(TENANT_UPLOADS):
        place = uploads.begin("a", 0)
        assert place is not None
        place.size_bytes = int(2 * YIELD_S * YIELD_BYTES_PER_S)
    assert uploads.begin("a", 2 * YIELD_S) is None
    assert uploads.begin("a", 2 * YIELD_S + 1) is not None


def test_a_place_ends_where_too_little_comes() -> None:
    place = Uploads().begin("a", 5)
    assert place is not None
    assert place.ends_s == 5 + GRACE_S
    place.size_bytes = int(90 * MIN_BYTES_PER_S)
    assert place.ends_s == 95 + GRACE_S
