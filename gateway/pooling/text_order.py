"""Decides which texts of a call wait for which, so that a beginning that several have is computed once.

    ids of texts --whole blocks, a trie--> for each text, the earliest one whose blocks it shares and finds, or none

A text that begins as an earlier one does waits until that one has ended; its blocks are in the pool then. The earliest
text with the longest common beginning is chosen, so texts that follow one text run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence


def leaders(texts: Sequence[Sequence[int]], block_tokens: int) -> list[int | None]:
    """Returns for each text the number of the one that it waits for, which is an earlier one; None where it shares no
    whole block with any. A text finds blocks that end before its last token, as the last token is always computed."""
    # A node of the trie is a number; its owner is the earliest text that passes it. The root is node 0.
    nodes: dict[tuple[int, tuple[int, ...]], int] = {}
    owners: list[int] = []
    found: list[int | None] = []
    for number, ids in enumerate(texts):
        node, leader = 0, None
        # A text's last whole block is never committed where it is also its end.
        for start in range(0, len(ids) - block_tokens, block_tokens):
            step = node, tuple(ids[start : start + block_tokens])
            if step in nodes:
                leader = owners[nodes[step] - 1]
            else:
                owners.append(number)
                nodes[step] = len(owners)
            node = nodes[step]
        found.append(leader)
    return found
