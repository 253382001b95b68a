"""Answers as sentence-transformers: writes checkpoints in its own form, and prints what it makes of texts and pairs.

One JSON object comes in by standard input: ``embed`` has objects with ``folder``, ``out``, ``pooling``, ``normalized``,
``prompts``, ``prompt`` (the default one's name), ``max_seq_length``, ``texts`` and ``dimensions``; ``score`` has
objects with ``folder``, ``out`` and ``pairs``. The answers come out as
``{"embed": [vectors of each], "score": [scores of each]}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

sys.path.append(sys.argv[1])

from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer


def embed(asked: dict[str, Any]) -> list[list[float]]:
    """Return the vector of each text; leave the checkpoint in ``out``."""
    within = Transformer(asked["folder"], max_seq_length=asked["max_seq_length"])
    modules = [within, Pooling(within.get_embedding_dimension(), pooling_mode=asked["pooling"])]
    modules += [Normalize()] if asked["normalized"] else []
    model = SentenceTransformer(
        modules=modules, prompts=asked["prompts"], default_prompt_name=asked["prompt"], device="cpu"
    )
    model.save(asked["out"])
    # A prefix of a normalized vector is normalized again, as Matryoshka model cards require.
    again = {"normalize_embeddings": True} if asked["normalized"] else {}
    found: list[list[float]] = model.encode(asked["texts"], truncate_dim=asked["dimensions"], **again).tolist()
    return found


def score(asked: dict[str, Any]) -> list[float]:
    """Return the score of each pair; leave the checkpoint in ``out``."""
    model = CrossEncoder(asked["folder"], device="cpu")
    model.save(asked["out"])
    found: list[float] = model.predict(asked["pairs"]).tolist()
    return found


def main() -> None:
    """Answer the request on standard input."""
    asked = json.load(sys.stdin)
    found = {"embed": list(map(embed, asked["embed"])), "score": list(map(score, asked["score"]))}
    print(json.dumps(found))


main()
