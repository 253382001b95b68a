"""The measured shapes: Llama 3 8B, and a tiny Llama for smoke runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pillion.kernels.step import StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The shape of a Llama, with the fields of its config.json."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
        }

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, in bfloat16."""
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of a layer's products by name."""
        return {
            "qkv": (self.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim),
            "o": (self.heads * self.head_dim, self.hidden),
            "gate_up": (self.hidden, 2 * self.inner),
            "down": (self.inner, self.hidden),
        }


LLAMA_8B = LlamaShape(
    hidden=4096,
    layers=32,
    inner=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    max_positions=131072,
)
TINY = LlamaShape(hidden=32, layers=1, inner=48, heads=2, kv_heads=1, head_dim=16, vocab=260, max_positions=4096)


def shape_of(smoke: bool) -> LlamaShape:
    return TINY if smoke else LLAMA_8B


def write_model(folder: Path, shape: LlamaShape) -> Path:
    """Write a model's folder without weights: config.json and a byte tokenizer. Needs ``tokenizers``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1, **{letter: place + 2 for place, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """One sequence of a step: ``tokens`` run after ``prefix`` tokens in the pool; with ``sampled``, the last token has
    logits.
    """

    tokens: int
    prefix: int
    sampled: bool = True


def decodes(count: int, context: int) -> list[BatchEntry]:
    """Return ``count`` streams, each at token number ``context``."""
    return [BatchEntry(1, context - 1)] * count


class Tables:
    """Block tables scattered over a pool as after hours of service; slots repeat if a batch needs more."""

    def __init__(self, slots: int, block_size: int) -> None:
        self._order = np.random.default_rng(0).permutation(slots).astype(np.int32)
        self._block_size = block_size

    def batch(self, entries: list[BatchEntry], *, token: int = 5) -> StepBatch:
        """Make a step of these sequences, each with distinct slots."""
        counts = np.array([entry.tokens for entry in entries], np.int32)
        contexts = np.array([entry.prefix + entry.tokens for entry in entries], np.int32)
        blocks = -(-contexts // self._block_size)
        begins = np.concatenate(([0], np.cumsum(blocks)))
        tables = np.zeros((len(entries), int(blocks.max())), np.int32)
        for row, (begin, count) in enumerate(zip(begins, blocks, strict=False)):
            tables[row, :count] = self._order[np.arange(begin, begin + count) % len(self._order)]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        positions = [np.arange(entry.prefix, entry.prefix + entry.tokens, dtype=np.int32) for entry in entries]
        return StepBatch(
            token_ids=np.full(int(counts.sum()), token, np.int32),
            positions=np.concatenate(positions),
            query_starts=starts,
            context_lens=contexts,
            block_tables=tables,
            sample_rows=np.array(
                [end - 1 for end, entry in zip(starts[1:], entries, strict=True) if entry.sampled], np.int32
            ),
        )
