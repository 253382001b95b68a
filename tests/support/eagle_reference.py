"""EAGLE-3 in plain torch, from the published algorithm, without any cache."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, scaled_dot_product_attention, silu


class EagleReference:
    """A head in float32, and the transformers model that provides its hidden states."""

    def __init__(self, folder: pathlib.Path, main: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layer = config.get("transformer_layer_config", config)
        self.before = bool(config.get("norm_before_residual"))
        options = config.get("eagle_config") or config
        layers = main.config.num_hidden_layers
        self.aux_hidden_state_layers = options.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
        tensors = load_file(folder / "model.safetensors")
        self.tensors = {name.removeprefix("layers.0.").removeprefix("midlayer."): one for name, one in tensors.items()}
        self.embedding = self.tensors.get("embed_tokens.weight", main.get_input_embeddings().weight)
        self.main = main.eval()

    @torch.inference_mode()
    def states(self, text: Sequence[int]) -> torch.Tensor:
        """Return [T, layers * hidden], the inputs of the layers that the head reads."""
        found = self.main(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in self.aux_hidden_state_layers], -1)

    @torch.inference_mode()
    def draft_tokens(self, text: Sequence[int], count: int, begin: int = 0) -> list[int]:
        """Return the likeliest ``count`` tokens after ``text``, by the states from position ``begin`` on."""
        states = self._times(self.states(text)[begin:-1], "fc")
        tokens = list(text[begin + 1 :])
        found: list[int] = []
        while len(found) < count:
            hidden = self._layer(states, tokens, begin)
            draft = int(linear(self._norm(hidden[-1:], "norm"), self.tensors["lm_head.weight"]).argmax())
            found.append(draft + int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else draft)
            tokens.append(found[-1])
            states = torch.cat((states, hidden[-1:]))
        return found

    def _layer(self, states: torch.Tensor, tokens: list[int], begin: int) -> torch.Tensor:
        embedded = self._norm(self.embedding[torch.tensor(tokens)], "input_layernorm")
        normed = self._norm(states, "hidden_norm")
        rows = torch.cat((embedded, normed), -1)
        q, k, v = (
            self._times(rows, f"self_attn.{name}_proj").view(len(rows), -1, self.layer["head_dim"]).transpose(0, 1)
            for name in "qkv"
        )
        if "self_attn.q_norm.weight" in self.tensors:
            q, k = self._norm(q, "self_attn.q_norm"), self._norm(k, "self_attn.k_norm")
        positions = torch.arange(begin, begin + len(rows))
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        hidden = (normed if self.before else states) + self._times(
            attended.transpose(0, 1).flatten(1), "self_attn.o_proj"
        )
        inner = self._norm(hidden, "post_attention_layernorm")
        gated = silu(self._times(inner, "mlp.gate_proj")) * self._times(inner, "mlp.up_proj")
        return hidden + self._times(gated, "mlp.down_proj")

    def _times(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return linear(rows, self.tensors[f"{name}.weight"])

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.layer.get("rms_norm_eps", 1e-6)
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps) * self.tensors[f"{name}.weight"]

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        width = heads.shape[-1]
        theta = self.layer.get("rope_theta", 10_000.0)
        angles = positions[:, None] * theta ** (-torch.arange(0, width, 2) / width)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        first, second = heads.chunk(2, -1)
        return heads * cos + torch.cat((-second, first), -1) * sin
