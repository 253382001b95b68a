"""Drafters and their configuration for tests."""

from __future__ import annotations

from pillion.speculative_config import SpeculativeConfig


def guessing(tokens: int, method: str = "ngram") -> SpeculativeConfig:
    """Return a configuration that guesses so many tokens a step; with 0, none."""
    return SpeculativeConfig(method=method, num_speculative_tokens=tokens) if tokens else SpeculativeConfig()
