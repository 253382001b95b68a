"""Places of a prompt's kept states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pillion.engine.scheduling.sequence import Sequence
from pillion.engine.scheduling.state_positions import StatePositions

BLOCK = 4


def places(num_tokens: int, *, pages: int = 100, **fields: Any) -> StatePositions:
    values = {"num_tokens": num_tokens, "block_size": BLOCK, "num_computed": 0, "known_blocks": 0, "is_prefill": False}
    return StatePositions(cast(Sequence, SimpleNamespace(**({"kept_tokens": ()} | values | fields))), pages)


def kept(of: StatePositions, ends: range) -> list[int]:
    """Return after how many tokens states are kept of a sequence with these step ends."""
    return [end for end in ends if of.reached(end)]


@pytest.mark.parametrize(
    ("num_tokens", "fields", "wanted"),
    [
        (30, {}, [28]),
        (29, {}, [28]),
        (28, {}, [24]),
        (30, {"known_blocks": 3}, [12, 28]),
        (30, {"known_blocks": 7}, [28]),
        # The client's places round down to whole blocks.
        (30, {"kept_tokens": (13, 3, 20, 30)}, [12, 20, 28]),
        (30, {"kept_tokens": (13,), "num_computed": 12, "known_blocks": 5}, [20, 28]),
        (28, {"is_prefill": True, "kept_tokens": (9, 29)}, [8]),
        # Places beyond the last whole block, or already found, are dropped.
        (30, {"known_blocks": 9}, [28]),
        (30, {"known_blocks": 3, "num_computed": 12}, [28]),
        # The end of a range is kept separately; later places are dropped.
        (28, {"is_prefill": True}, []),
        (28, {"is_prefill": True, "known_blocks": 3}, [12]),
        (28, {"is_prefill": True, "known_blocks": 7}, []),
        (28, {"is_prefill": True, "known_blocks": 9}, []),
    ],
)
def test_states_are_kept_at_the_last_whole_block_and_branch_points(
    num_tokens: int, fields: dict[str, Any], wanted: list[int]
) -> None:
    of = places(num_tokens, **fields)
    start = fields.get("num_computed", 0)
    assert of.left == wanted
    assert all(of.wants(at) for at in wanted)
    assert kept(of, range(start + 1, num_tokens + 20)) == wanted


def test_cheap_states_are_kept_periodically_at_step_ends() -> None:
    """A one-page state: after 64 blocks without one. No step ends earlier for it, and none within an answer."""
    of = places(1000, pages=1, known_blocks=75)
    assert of.left == [300, 996]
    assert kept(of, range(90, 2000, 10)) == [260, 300, 560, 820]
    assert kept(places(1000, pages=2), range(100, 2000, 4)) == [512, 996]
    assert kept(places(1000, pages=1, num_computed=400), range(404, 2000, 4)) == [656, 912, 996]
