"""Dependencies between the texts of a call: a property over lists of ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pillion.gateway.pooling.text_call import leaders

TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=12)


def found_blocks(ids: list[int], other: list[int], block: int) -> int:
    """Count the whole blocks of a text, without its last token, that another text commits."""
    count = 0
    while (end := (count + 1) * block) < min(len(ids), len(other)) and ids[:end] == other[:end]:
        count += 1
    return count


@given(TEXTS, st.integers(1, 3))
def test_a_text_waits_for_the_first_text_with_the_longest_shared_prefix(texts: list[list[int]], block: int) -> None:
    for number, leader in enumerate(leaders(texts, block)):
        shared = [found_blocks(texts[number], earlier, block) for earlier in texts[:number]]
        most = max(shared, default=0)
        assert leader == (shared.index(most) if most else None)


def test_documents_of_one_query_wait_for_the_first_only() -> None:
    query, other = [1, 2, 3, 4], [1, 2, 9, 9]
    pairs = [[*query, 5], [*query, 6], [*query, 7], [*other, 5], [*other, 6]]
    assert leaders(pairs, 2) == [None, 0, 0, 0, 3]
