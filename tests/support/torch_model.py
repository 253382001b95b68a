"""Manual driver of a backend, over a pool in plain memory."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pillion.engine.backends.host_backend import HostBackend
from pillion.engine.backends.torch_backend import TorchBackend
from pillion.engine.checkpoints.prepare import PreparedModel
from tests.support.batches import Sequences


def perturb_vectors(folder: pathlib.Path, seed: int = 1) -> None:
    """Randomize norms and biases, since with the initial ones and zeros an omitted one would go unnoticed."""
    path = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or name.endswith("_bias"):
            tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, path, metadata={"format": "pt"})


class BackendDriver:
    """One backend, one pool of NaN, any number of texts."""

    def __init__(
        self,
        prepared: PreparedModel,
        block_size: int = 16,
        num_slots: int = 64,
        seed: int = 0,
        backend: HostBackend | None = None,
    ) -> None:
        self.prepared = prepared
        self.backend: Any = backend or TorchBackend(prepared, block_size, 1)
        self.bind(num_slots)
        self.sequences = Sequences(num_slots, block_size, seed)

    def bind(self, num_slots: int) -> None:
        """Bind a cache-aligned pool of bytes 0xff (NaN in bf16 and fp32), so that reading an unwritten row shows in the
        results."""
        from pillion.kernels.cpu.runtime.program import aligned_bytes

        pool = aligned_bytes(num_slots * self.backend.layout.block_bytes)
        pool[:] = 0xFF
        self.memory: Any = memoryview(pool)
        self.backend.bind_pool(self.memory, num_slots)

    def step(self, *parts: tuple[int, Sequence[int]], sample: Sequence[int] | None = None) -> torch.Tensor:
        """Run one batch; return the logits of each part's last token, or of ``sample``."""
        logits: torch.Tensor = self.backend.forward(self.sequences.step(parts, sample)).clone()
        return logits

    def run_all(self, number: int, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """Run a text in chunks of these sizes and the rest in one; return the logits of all its tokens."""
        ends = [*torch.tensor(chunks, dtype=torch.int64).cumsum(0).tolist(), len(tokens)]
        found, begin = [], 0
        for end in ends:
            found.append(self.step((number, tokens[begin:end]), sample=range(end - begin)))
            begin = end
        return torch.cat(found)

    def greedy(self, prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """Run the prompt in two chunks and then decode greedily, up to a stop token."""
        (number,) = self.sequences.add()
        head = len(prompt) // 2
        if head:
            assert self.step((number, prompt[:head]), sample=()).shape == (0, self.backend.vocab_size)
        tokens = [int(self.step((number, prompt[head:])).argmax())]
        while len(tokens) < max_tokens and tokens[-1] not in stop:
            tokens.append(int(self.step((number, tokens[-1:])).argmax()))
        return tokens

    def check_among_others(
        self, number: int, text: Sequence[int], chunks: Sequence[int], wanted: torch.Tensor, others: Sequence[int]
    ) -> None:
        """Run a text in chunks of these sizes and the rest in one. In each step other sequences advance by up to 20
        tokens, and this one's place among them changes. Assert that its logits are bitwise ``wanted`` (I6)."""
        begin, places = 0, len(others) + 1
        for step, count in enumerate([*chunks, len(text) - sum(chunks)]):
            ids = torch.randint(self.backend.vocab_size, (20,), generator=torch.Generator().manual_seed(step)).tolist()
            parts = [(other, ids[: 1 + (step * 7 + other) % 20]) for other in others]
            parts.insert(step % places, (number, list(text[begin : begin + count])))
            first = sum(len(tokens) for _, tokens in parts[: step % places])
            found = self.step(*parts, sample=range(first, first + count))
            assert torch.equal(found, wanted[begin : begin + count]), f"tokens from {begin}"
            begin += count
