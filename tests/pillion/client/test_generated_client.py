"""The blocking client in the repository equals what is generated from the asyncio client."""

from __future__ import annotations

import pytest

from lab import blocking_client


def test_the_blocking_client_is_up_to_date() -> None:
    made = blocking_client.blocking((blocking_client.FOLDER / "async_client.py").read_text())
    assert made == (blocking_client.FOLDER / "client.py").read_text(), "run `make client`"


def test_a_stale_replacement_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not occur"):
        blocking_client.blocking("class Renamed: ...\n")
