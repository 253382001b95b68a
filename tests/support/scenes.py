"""Random scenes for a rule and its model: one hypothesis example is a seed for many small scenes."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

# Python draws a scene of ten objects in a tenth of a millisecond, hypothesis in milliseconds.
SCENES = 20


def random_scenes(count: int = SCENES) -> st.SearchStrategy[list[Random]]:
    return st.integers(0, 2**32 - 1).map(lambda seed: [Random(seed * count + number) for number in range(count)])
