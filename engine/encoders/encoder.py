"""Forward pass of an encoder over one text on torch, and a classifier's head over its vector.

    BERT, RoBERTa:  rows = norm(words + kinds + positions)
                    each layer:  rows = norm(rows + attention(rows));  rows = norm(rows + mlp(rows))
    ModernBERT:     rows = norm(words)
                    each layer:  rows += attention(norm(rows));  rows += mlp(norm(rows))
                    norm(rows)

Attention is bidirectional, over the whole text or a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch.nn.functional import gelu, layer_norm, linear, relu, scaled_dot_product_attention, silu

from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.vector_head import Float32

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": lambda rows: gelu(rows, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}


class Encoder:
    """An encoder's tensors, by their names in files."""

    def __init__(self, config: EncoderConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._tensors = dict(tensors)
        self._act = ACTIVATIONS[config.activation]
        for layer in range(0 if config.rotary else config.num_layers):
            at = f"encoder.layer.{layer}.attention.self."
            for part in ("weight", "bias"):
                every = [self._tensors.pop(f"{at}{name}.{part}") for name in ("query", "key", "value")]
                self._tensors[f"{at}all.{part}"] = torch.cat(every)

    def rows(self, token_ids: torch.Tensor, second_from: int) -> torch.Tensor:
        """Return the last hidden states [T, hidden] of one text [T]. ``second_from``: start of the second text of a
        pair; 0 for a single text."""
        return self._rotary(token_ids) if self._config.rotary else self._learned(token_ids, second_from)

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias")
        return layer_norm(rows, weight.shape, weight, bias, self._config.eps)

    def _learned(self, token_ids: torch.Tensor, second_from: int) -> torch.Tensor:
        config, tensors = self._config, self._tensors
        kinds = torch.zeros_like(token_ids)
        if second_from and config.num_token_types > 1:
            kinds[second_from:] = 1
        rows = tensors["embeddings.word_embeddings.weight"][token_ids]
        rows = rows + tensors["embeddings.token_type_embeddings.weight"][kinds]
        rows = rows + tensors["embeddings.position_embeddings.weight"][self._positions(token_ids)]
        rows = self._norm("embeddings.LayerNorm", rows)
        for layer in range(config.num_layers):
            at = f"encoder.layer.{layer}."
            found = _attended(self._linear(f"{at}attention.self.all", rows), config.num_heads)
            found = self._linear(f"{at}attention.output.dense", found)
            rows = self._norm(f"{at}attention.output.LayerNorm", found + rows)
            found = self._linear(f"{at}output.dense", self._act(self._linear(f"{at}intermediate.dense", rows)))
            rows = self._norm(f"{at}output.LayerNorm", found + rows)
        return rows

    def _positions(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return each token's row of the learned positions. In RoBERTa's kind, padding tokens within a text are not
        counted and have the padding's position."""
        padding = self._config.padding_id
        if padding is None:
            return torch.arange(len(token_ids))
        counted = (token_ids != padding).long()
        return counted.cumsum(0) * counted + padding

    def _rotary(self, token_ids: torch.Tensor) -> torch.Tensor:
        config = self._config
        rows = self._norm("embeddings.norm", self._tensors["embeddings.tok_embeddings.weight"][token_ids])
        count, width = rows.shape
        tables = {theta: _angles(theta, count, width // config.num_heads, rows.dtype) for theta in {*config.thetas}}
        masks = {window: _near(count, window) for window in {*config.windows}}
        for layer, (theta, window) in enumerate(zip(config.thetas, config.windows, strict=True)):
            at = f"layers.{layer}."
            read = self._norm(f"{at}attn_norm", rows) if layer else rows
            made = self._linear(f"{at}attn.Wqkv", read)
            found = _attended(made, config.num_heads, tables[theta], masks[window])
            rows = rows + self._linear(f"{at}attn.Wo", found)
            up, gate = self._linear(f"{at}mlp.Wi", self._norm(f"{at}mlp_norm", rows)).chunk(2, -1)
            rows = rows + self._linear(f"{at}mlp.Wo", self._act(up) * gate)
        return self._norm("final_norm", rows)

    def logits(self, vector: Float32) -> Float32:
        """Return the logits [labels] of a text's vector [hidden]."""
        with torch.inference_mode():
            kind = next(iter(self._tensors.values())).dtype
            row = torch.from_numpy(np.array(vector, np.float32)).to(kind)[None]
            match self._config.head:
                case "pooler":
                    found = self._linear("classifier", self._linear("pooler.dense", row).tanh())
                case "dense":
                    found = self._linear("classifier.out_proj", self._linear("classifier.dense", row).tanh())
                case _:
                    act = ACTIVATIONS[self._config.head_activation]
                    found = self._linear("classifier", self._norm("head.norm", act(self._linear("head.dense", row))))
            logits: Float32 = found[0].float().numpy()
            return logits


def _attended(
    made: torch.Tensor,
    heads: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention outputs [T, hidden] of fused queries, keys and values [T, 3 * hidden]."""
    queries, keys, values = made.view(len(made), 3, heads, -1).permute(1, 2, 0, 3)
    if angles is not None:
        queries, keys = _turned(queries, *angles), _turned(keys, *angles)
    found = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask)
    return found[0].transpose(0, 1).reshape(len(made), -1)


def _turned(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = rows.float().chunk(2, -1)
    return (rows.float() * cos + torch.cat((-second, first), -1) * sin).to(rows.dtype)


def _angles(theta: float, count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [T, width] of a text's positions, cast to the model's type as in transformers."""
    rates = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    turns = torch.arange(count, dtype=torch.float32)[:, None] * rates
    both = torch.cat((turns, turns), -1)
    return both.cos().to(dtype), both.sin().to(dtype)


def _near(count: int, window: int) -> torch.Tensor | None:
    """Return the attention mask [T, T] of a sliding window; None if it covers the text."""
    if not window or count <= window + 1:
        return None
    places = torch.arange(count)
    return (places[:, None] - places).abs() <= window
