"""Adapter names across gateways converge under any order of changes, losses and deliveries."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pillion.gateway.adapters.name_table import FORGET_MS, MAX_CHANGES, NamedAdapter, NameTable
from pillion.kvstore.index.shared_names import StampedValue
from tests.support.examples import examples

NAMES = ("a", "b", "c")
GATEWAYS = 3


def adapter(name, version):
    return NamedAdapter(name=name, parent="toy", digest=f"{version:064x}", rank=4, path=f"/adapters/{version}")


class FakeRegistry:
    """In-memory equivalent of lua/share_names.lua."""

    def __init__(self):
        self.rows = {}

    def share(self, sent):
        for name, change in sent:
            before = self.rows.get(name)
            if before is None or before < change:
                self.rows[name] = change
        return dict(self.rows)


def meet(table, registry, now_ms=1000):
    while True:
        sent = table.unsent()
        found = registry.share(sent)
        table.merge(sent, found, now_ms)
        table.check_integrity()
        if not table.unsent():
            return


GATEWAY, NAME = st.integers(0, GATEWAYS - 1), st.sampled_from(NAMES)
EVENTS = st.one_of(
    st.tuples(st.just("put"), GATEWAY, NAME),
    st.tuples(st.just("remove"), GATEWAY, NAME),
    st.tuples(st.just("meet"), GATEWAY),
    st.tuples(st.just("emptied")),
)


@settings(max_examples=examples(300))
@given(st.lists(EVENTS, max_size=30), st.lists(st.integers(-5, 5), min_size=GATEWAYS, max_size=GATEWAYS))
def test_all_gateways_converge_to_the_same_names(events, skews):
    """Let clocks differ and changes happen without a registry; the fixed name stays."""
    registry, tables = FakeRegistry(), [NameTable([adapter("a", 99)]) for _ in range(GATEWAYS)]
    for now, (kind, *of) in enumerate(events):
        match kind:
            case "put":
                tables[of[0]].put(adapter(of[1], now), 100 + now + skews[of[0]])
            case "remove":
                tables[of[0]].remove(of[1], 100 + now + skews[of[0]])
            case "meet":
                meet(tables[of[0]], registry)
            case "emptied":
                registry.rows.clear()
    for table in tables * 2:
        meet(table, registry)
    # Fixed names are local to each gateway.
    found = [[one for one in table.all() if one.name != "a"] for table in tables]
    assert found[0] == found[1] == found[2]
    assert all(table.find("a") == adapter("a", 99) for table in tables)


def test_a_later_change_wins_with_any_clock_skew():
    registry, first, second = FakeRegistry(), NameTable(), NameTable()
    first.put(adapter("a", 1), 1000)
    meet(first, registry)
    meet(second, registry)
    second.put(adapter("a", 2), 500)
    meet(second, registry)
    meet(first, registry)
    assert first.find("a") == second.find("a") == adapter("a", 2)
    first.remove("a", 400)
    meet(first, registry)
    meet(second, registry)
    assert first.find("a") is second.find("a") is None


def test_malformed_entries_change_nothing():
    table = NameTable()
    table.put(adapter("a", 1), 10)
    rows = {"a": StampedValue(5, b"{}"), "b": StampedValue(5, b"nonsense"), "c": StampedValue(5, b'{"name":"d"}')}
    astray = msgspec.structs.replace(adapter("e", 1), digest="../../elsewhere")
    rows["e"] = StampedValue(5, msgspec.json.encode(astray))
    rows["f"] = StampedValue(5, msgspec.json.encode(adapter("g", 1)))
    table.merge(table.unsent(), rows, 20)
    assert [one.name for one in table.all()] == ["a"]
    assert table.unsent() == [("a", StampedValue(10, table.unsent()[0][1].value))]


def test_unloaded_names_are_forgotten_after_a_while():
    table, registry = NameTable(), FakeRegistry()
    table.put(adapter("a", 1), 10)
    table.put(adapter("b", 1), 10)
    table.remove("a", 20)
    meet(table, registry)
    for now_ms, names in ((FORGET_MS, {"a", "b"}), (FORGET_MS + 20, {"b"})):
        registry.rows.clear()
        meet(table, registry, now_ms)
        assert registry.rows.keys() == names


def test_the_number_of_forgotten_names_is_bounded():
    table = NameTable()
    table.put(adapter("stays", 1), 5)
    for number in range(MAX_CHANGES + 10):
        table.put(adapter(f"n{number}", 1), 10 + 2 * number)
        table.remove(f"n{number}", 11 + 2 * number)
    table.check_integrity()
    sent = [name for name, _ in table.unsent()]
    assert len(sent) == MAX_CHANGES
    assert "stays" in sent
    assert f"n{MAX_CHANGES + 9}" in sent
    assert "n0" not in sent
