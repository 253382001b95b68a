"""Forward pass of an encoder over one text on torch, and a classifier's head over its vector.

    BERT, RoBERTa:  rows = norm(tokens + token types + positions)
                    each layer:  rows = norm(rows + attention(rows));  rows = norm(rows + mlp(rows))
    ModernBERT:     rows = norm(tokens)
                    each layer:  rows += attention(norm(rows));  rows += mlp(norm(rows))
                    norm(rows)

Attention is bidirectional, over the whole text or a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn.functional import layer_norm, linear, scaled_dot_product_attention

from pillion.engine.models.encoder_config import EncoderConfig
from pillion.engine.models.layers import ACTIVATIONS
from pillion.engine.models.vector_head import Float32


class Encoder:
    """An encoder; ``tensors`` are its weights, by their names in files."""

    def __init__(self, config: EncoderConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._tensors = dict(tensors)
        self._act = ACTIVATIONS[config.activation]
        for layer in range(0 if config.rotary else config.num_layers):
            prefix = f"encoder.layer.{layer}.attention.self."
            for part in ("weight", "bias"):
                qkv = [self._tensors.pop(f"{prefix}{name}.{part}") for name in ("query", "key", "value")]
                self._tensors[f"{prefix}all.{part}"] = torch.cat(qkv)

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
        """Run an encoder with learned positions, like BERT."""
        config, tensors = self._config, self._tensors
        token_types = torch.zeros_like(token_ids)
        if second_from and config.num_token_types > 1:
            token_types[second_from:] = 1
        rows = tensors["embeddings.word_embeddings.weight"][token_ids]
        rows = rows + tensors["embeddings.token_type_embeddings.weight"][token_types]
        rows = rows + tensors["embeddings.position_embeddings.weight"][self._positions(token_ids)]
        rows = self._norm("embeddings.LayerNorm", rows)
        for layer in range(config.num_layers):
            prefix = f"encoder.layer.{layer}."
            outputs = _attend(self._linear(f"{prefix}attention.self.all", rows), config.num_heads)
            outputs = self._linear(f"{prefix}attention.output.dense", outputs)
            rows = self._norm(f"{prefix}attention.output.LayerNorm", outputs + rows)
            outputs = self._linear(
                f"{prefix}output.dense", self._act(self._linear(f"{prefix}intermediate.dense", rows))
            )
            rows = self._norm(f"{prefix}output.LayerNorm", outputs + rows)
        return rows

    def _positions(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the row of each token [T] in the table of learned positions. RoBERTa does not count padding tokens
        within a text; they have a position of their own."""
        padding = self._config.padding_id
        if padding is None:
            return torch.arange(len(token_ids))
        counted = (token_ids != padding).long()
        return counted.cumsum(0) * counted + padding

    def _rotary(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Run an encoder with rotary embeddings, like ModernBERT."""
        config = self._config
        rows = self._norm("embeddings.norm", self._tensors["embeddings.tok_embeddings.weight"][token_ids])
        count, width = rows.shape
        tables = {theta: _angles(theta, count, width // config.num_heads, rows.dtype) for theta in {*config.thetas}}
        masks = {window: _window_mask(count, window) for window in {*config.windows}}
        for layer, (theta, window) in enumerate(zip(config.thetas, config.windows, strict=True)):
            prefix = f"layers.{layer}."
            normed = self._norm(f"{prefix}attn_norm", rows) if layer else rows
            qkv = self._linear(f"{prefix}attn.Wqkv", normed)
            outputs = _attend(qkv, config.num_heads, tables[theta], masks[window])
            rows = rows + self._linear(f"{prefix}attn.Wo", outputs)
            up, gate = self._linear(f"{prefix}mlp.Wi", self._norm(f"{prefix}mlp_norm", rows)).chunk(2, -1)
            rows = rows + self._linear(f"{prefix}mlp.Wo", self._act(up) * gate)
        return self._norm("final_norm", rows)

    def logits(self, vector: Float32) -> Float32:
        """Return the logits [labels] of a text's vector [hidden]."""
        with torch.inference_mode():
            dtype = next(iter(self._tensors.values())).dtype
            row = torch.from_numpy(np.array(vector, np.float32)).to(dtype)[None]
            match self._config.head:
                case "pooler":
                    outputs = self._linear("classifier", self._linear("pooler.dense", row).tanh())
                case "dense":
                    outputs = self._linear("classifier.out_proj", self._linear("classifier.dense", row).tanh())
                case _:
                    act = ACTIVATIONS[self._config.head_activation]
                    outputs = self._linear("classifier", self._norm("head.norm", act(self._linear("head.dense", row))))
            logits: Float32 = outputs[0].float().numpy()
            return logits


def _attend(
    qkv: torch.Tensor,
    heads: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention outputs [T, hidden] of fused queries, keys and values [T, 3 * hidden]."""
    queries, keys, values = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)
    if angles is not None:
        queries, keys = _rotate(queries, *angles), _rotate(keys, *angles)
    outputs = scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask)
    return outputs[0].transpose(0, 1).reshape(len(qkv), -1)


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = rows.float().chunk(2, -1)
    return (rows.float() * cos + torch.cat((-second, first), -1) * sin).to(rows.dtype)


def _angles(theta: float, count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [T, width] of a text's positions, cast to the model's type as in transformers."""
    frequencies = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    angles = torch.arange(count, dtype=torch.float32)[:, None] * frequencies
    doubled = torch.cat((angles, angles), -1)
    return doubled.cos().to(dtype), doubled.sin().to(dtype)


def _window_mask(count: int, window: int) -> torch.Tensor | None:
    """Return the attention mask [T, T] of a sliding window; None if it covers the text. ``window``: tokens to either
    side; 0 is unlimited."""
    if not window or count <= window + 1:
        return None
    positions = torch.arange(count)
    return (positions[:, None] - positions).abs() <= window
