"""transformers as the oracle: greedy tokens, with the margin of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Expected:
    """Greedy continuation of a prompt and, per token, the gap between the two highest logits."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class Oracle:
    """A transformers model on the CPU, in fp32 by default."""

    def __init__(self, model: Any, stop: Sequence[int] = ()) -> None:
        self.model = model.eval()
        self.stop = frozenset(stop)
        # Longest continuation of each prompt so far: tests of one model repeat prompts on each path.
        self._known: dict[tuple[int, ...], Expected] = {}

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> Expected:
        """Return the continuation up to ``max_tokens`` or a stop token, inclusive."""
        known = self._known.get(tuple(prompt))
        if known is None or (len(known.tokens) < max_tokens and not (known.tokens and known.tokens[-1] in self.stop)):
            known = self._known[tuple(prompt)] = self._continued(prompt, max_tokens)
        return Expected(known.tokens[:max_tokens], known.gaps[:max_tokens])

    @torch.inference_mode()
    def difference(self, prompt: Sequence[int], got: Sequence[int], max_tokens: int, epsilon: float) -> str:
        """Return :func:`first_difference` of ``got`` and the continuation, by one pass over prompt and answer instead
        of one per token. Up to the first difference the answer is the continuation."""
        ids = torch.tensor([[*prompt, *got]])
        logits = self.model(ids, use_cache=False, logits_to_keep=len(got) + 1).logits[0, :max_tokens]
        top = logits.float().topk(2)
        tokens, gaps = top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist()
        ended = next((position + 1 for position, token in enumerate(tokens) if token in self.stop), len(tokens))
        return first_difference(Expected(tuple(tokens[:ended]), tuple(gaps[:ended])), got, epsilon)

    @torch.inference_mode()
    def _continued(self, prompt: Sequence[int], max_tokens: int) -> Expected:
        """Compute it step by step with a KV cache."""
        ids, cache = torch.tensor([list(prompt)]), None
        tokens: list[int] = []
        gaps: list[float] = []
        while len(tokens) < max_tokens and not (tokens and tokens[-1] in self.stop):
            # Bamba's model counts positions from 0 in each step by itself.
            end = len(prompt) + len(tokens)
            places = torch.arange(end - ids.shape[1], end)[None]
            out = self.model(ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
            top = out.logits[0, -1].float().topk(2)
            tokens.append(int(top.indices[0]))
            gaps.append(float(top.values[0] - top.values[1]))
            ids, cache = top.indices[:1].view(1, 1), out.past_key_values
        return Expected(tuple(tokens), tuple(gaps))


def first_difference(expected: Expected, got: Sequence[int], epsilon: float) -> str:
    """Return "" if ``got`` is the oracle's answer up to a tie, else the difference.

    A token may differ only where the oracle's two best logits are closer than ``epsilon``; after that the two texts are
    different prompts, so the comparison ends.
    """
    for position, (want, gap) in enumerate(zip(expected.tokens, expected.gaps, strict=True)):
        if position >= len(got):
            return f"ends after {len(got)} tokens, the oracle has {len(expected.tokens)}"
        if got[position] != want:
            if gap < epsilon:
                return ""
            return f"token {position} is {got[position]}, the oracle says {want} with a gap of {gap:.4f}"
    return "" if len(got) == len(expected.tokens) else f"{len(got)} tokens, the oracle has {len(expected.tokens)}"
