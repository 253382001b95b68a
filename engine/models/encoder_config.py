"""Describes an encoder: a model whose tokens all see each other, and which gives vectors of whole texts alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Describes an encoder's layers. Widths, tokens and labels are those of its ModelConfig.

    Attributes:
        num_layers, num_heads: how many there are.
        eps: the norms' smallest variance.
        activation: that of the MLPs: "gelu" with erf, "gelu_tanh", "relu" or "silu".
        position_offset: how many learned positions come before that of the first token, which is behind the padding's.
        padding_id: the token that has the padding's position wherever it stands; None where positions are counted.
        num_positions: how many learned positions there are; 0 for an encoder with rotary embeddings.
        num_token_types: how many kinds of texts embeddings tell apart, of which a pair has two; 0 for none.
        thetas: the base of the rotary embedding of each layer; () for learned positions.
        windows: how far each layer's tokens see to either side; 0 sees everything. () for no windows.
        attention_bias, mlp_bias, norm_bias: which weights have biases.
        head: what a classifier does before its last product: "pooler" and "dense" are a product and tanh, named as BERT
            and RoBERTa do; "normed" is a product, ``head_activation`` and a norm; "" for a model without labels.
        head_bias: whether the product of "normed" has a bias.
    """

    num_layers: int
    num_heads: int
    eps: float
    activation: str
    position_offset: int = 0
    padding_id: int | None = None
    num_positions: int = 0
    num_token_types: int = 0
    thetas: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    head: str = ""
    head_activation: str = "gelu"
    head_bias: bool = False

    @property
    def rotary(self) -> bool:
        """Says whether it is an encoder of ModernBERT's kind: rotated, normed before its layers, with gated MLPs."""
        return bool(self.thetas)
