"""Config of an encoder: a bidirectional model, which only produces vectors of whole texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Layers of an encoder. Widths, vocabulary and labels are in its ModelConfig.

    Attributes:
        eps: epsilon of norms.
        activation: of MLPs: "gelu" with erf, "gelu_tanh", "relu" or "silu".
        position_offset: number of learned positions before that of the first token (RoBERTa: up to the padding's).
        padding_id: padding token, which has its own position and is not counted (RoBERTa); None if a token's position
            is its index.
        num_positions: number of learned positions; 0 with rotary embeddings.
        num_token_types: segments distinguished by embeddings (two in a pair); 0 for none.
        thetas: rotary base of each layer; () with learned positions.
        windows: attention window of each layer, to either side; 0 is unlimited. () for no windows.
        attention_bias, mlp_bias, norm_bias: True if attention, MLPs and norms have biases.
        head: layers before a classifier's last linear layer: "pooler" and "dense" for a linear layer and tanh, named as
            in BERT and in RoBERTa; "normed" for a linear layer, ``head_activation`` and a norm; "" without labels.
        head_bias: True if the linear layer of "normed" has a bias.
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
        """True for encoders like ModernBERT: rotary, pre-norm, gated MLPs."""
        return bool(self.thetas)
