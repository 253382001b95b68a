"""JSON of clients: parsing per call is bounded, and passed-on JSON is never parsed."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.request.client_json import MAX_PARSED_ITEMS, is_object, items_in, parsed

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def parts(value: object) -> int:
    """Count the objects that a parser allocates for a value, without its names."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(parts, inner))


@given(VALUES)
def test_the_count_of_parts_is_an_upper_bound(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
        assert parsed(text) == json.loads(text)
        assert is_object(text) is isinstance(value, dict)
        assert parts(value) <= 2 * items_in(text) + 1


@pytest.mark.parametrize(
    "text", ["", "[]", '"{}"', "{", '{"a":}', '{"a":1,}', "{} {}", '{"\\x": 1}', "[" * 5000, "\ud800"]
)
def test_values_that_are_not_objects(text: str) -> None:
    assert not is_object(text)
    assert is_object(' \n{"a": [1, {}]} ')


@pytest.mark.parametrize("item", ["[]", "{}", "0", "[[[]]]", '{"a":0}', "1.5"])
def test_too_many_items_are_refused_before_parsing(item: str) -> None:
    fits = MAX_PARSED_ITEMS // items_in(item + ",") - 1
    assert len(parsed("[" + ",".join([item] * fits) + "]")) == fits
    with pytest.raises(ValueError, match="more than 65536 brackets, braces and commas"):
        parsed("[" + ",".join([item] * (fits + 2)) + "]")


def test_long_numbers_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """msgspec needs as long for one of them as for a hundred short ones, in one call."""
    long = "1.2345678901234567890123456789e-300"
    assert parsed(f"[{long}, 1.5, 1e3, 0.1]") == [float(long), 1.5, 1000.0, 0.1]
    with pytest.raises(ValueError, match="out of range"):
        parsed("[1e400]")
    with pytest.raises(msgspec.DecodeError):
        parsed("[NaN]")
    assert math.isfinite(parsed("1e308"))
