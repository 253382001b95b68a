"""First tokens of second turns of a hybrid model, beside vLLM's CPU build on the same checkpoint.

    PILLION_VLLM=/path/to/vllm python -m lab.benchmarks.second_turns

The checkpoint has the shapes of Qwen3.5-0.8B's text model, random weights, and the demo model's tokenizer. It is
written as a Qwen3-Next, whose layers are the same, because vLLM's Qwen3.5 asks for torchvision; the last layer has
experts, of which a token takes as much as of an MLP, because vLLM asks for one. A chat is a prompt of ``--history``
tokens, an answer of ``--answer`` tokens, and a second turn: both of these and ``--new`` further tokens. What counts
is the time from sending the second turn to its first token. The systems are measured in turns, one chat at a time,
with vLLM paused while Pillion runs; ``--vllm-flags`` says how vLLM caches prefixes of such models. The first turn's
time is measured, too: it is what a system without a kept state pays again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from rich.table import Table

from lab.benchmarks.closed_loop import TOKEN_RANGE
from lab.benchmarks.peers import serving_vllm
from lab.benchmarks.report import save, show_table, spread
from lab.testbed.cluster import served
from lab.testbed.plain_model import plain_folder
from pillion import Client

# What the config of Qwen/Qwen3.5-0.8B says of shapes, with the demo tokenizer's vocabulary.
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
# The last layer has experts: two of them and the shared one are as wide as the other layers' MLP.
EXPERTS: dict[str, Any] = {
    "mlp_only_layers": list(range(SHAPE["num_hidden_layers"] - 1)),
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": SHAPE["intermediate_size"] - 2 * 1024,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
REQUEST_TIMEOUT_S = 600.0
MAX_MODEL_LEN_TOKENS = 8192


class TurnServer(Protocol):
    """A server that answers prompts of token ids."""

    def answer(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        """Returns seconds to the first token, and all ``tokens`` tokens of a greedy answer."""


def write_checkpoint(folder: pathlib.Path) -> None:
    """Writes the checkpoint: config, random weights in bfloat16, tokenizer."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    demo = plain_folder()
    vocabulary = json.loads((demo / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = Qwen3NextConfig(vocab_size=vocabulary, eos_token_id=2, bos_token_id=1, **SHAPE, **EXPERTS)
    model = Qwen3NextForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(demo / name, folder / name)


class PillionServer:
    """Pillion with its own defaults, over gRPC by the SDK."""

    def __init__(self, target: str) -> None:
        self._target = target

    def answer(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        with Client(self._target) as client:
            begin, first = time.perf_counter(), 0.0
            found: list[int] = []
            for part in client.generate(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True):
                if part.token_ids and not found:
                    first = time.perf_counter() - begin
                found += part.token_ids
        return first, found


class VllmServer:
    """vLLM's OpenAI API, streamed."""

    def __init__(self, url: str) -> None:
        self._url = url

    def answer(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        body = {
            "model": "peer",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        begin, first = time.perf_counter(), 0.0
        found: list[int] = []
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    fresh = json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if fresh and not found:
                        first = time.perf_counter() - begin
                    found += fresh
        return first, found


def chat(system: TurnServer, seed: str, args: argparse.Namespace) -> tuple[float, float]:
    """Returns the seconds to the first token of a chat's first and second turn."""
    draw = random.Random(seed)
    prompt = [draw.randrange(*TOKEN_RANGE) for _ in range(args.history)]
    first, answer = system.answer(prompt, args.answer)
    assert len(answer) == args.answer, f"an answer has {len(answer)} tokens"
    second, _ = system.answer([*prompt, *answer, *(draw.randrange(*TOKEN_RANGE) for _ in range(args.new))], 1)
    return first, second


def measure(model: pathlib.Path, args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Returns each system's chats: seconds to the first token of both turns."""
    found: dict[str, list[tuple[float, float]]] = {"vllm": [], "pillion": []}
    with contextlib.ExitStack() as stack:
        peer_flags = ("--max-model-len", str(MAX_MODEL_LEN_TOKENS), *shlex.split(args.vllm_flags))
        serving = serving_vllm(args.vllm, model, "bfloat16", peer_flags, model / "vllm.log")
        url, _, group = stack.enter_context(serving)
        flags = ("--max-model-len", str(MAX_MODEL_LEN_TOKENS), "--dtype", "bfloat16", *shlex.split(args.pillion_flags))
        own = PillionServer(stack.enter_context(served(model, str(model), *flags, split_policy="")).target)
        systems: dict[str, TurnServer] = {"vllm": VllmServer(url), "pillion": own}
        for turn in range(args.rounds + 1):
            for name, system in systems.items():
                if name == "pillion":
                    os.killpg(group, signal.SIGSTOP)
                chats = [chat(system, f"{turn} {number}", args) for number in range(args.chats)]
                os.killpg(group, signal.SIGCONT)
                # The first round warms caches and kernels.
                found[name] += chats if turn else []
    return found


def main() -> None:
    """Measure, print, and write results/second_turns.json."""
    parser = argparse.ArgumentParser(prog="python -m lab.benchmarks.second_turns", description=__doc__)
    parser.add_argument("--vllm", default=os.environ.get("PILLION_VLLM", "vllm"), help="vLLM's program")
    parser.add_argument("--vllm-flags", default="--enable-prefix-caching", help="further flags of vLLM")
    parser.add_argument("--pillion-flags", default="", help="further flags of pillion serve")
    parser.add_argument("--history", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of its answer")
    parser.add_argument("--new", type=int, default=32, help="tokens of the second turn")
    parser.add_argument("--chats", type=int, default=3, help="chats of a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        write_checkpoint(pathlib.Path(name))
        found = measure(pathlib.Path(name), args)
    table = Table("system", "first turn ms", "second turn ms", "least to most")
    result: dict[str, Any] = {key: getattr(args, key) for key in ("history", "answer", "new", "vllm_flags")}
    for system, chats in found.items():
        first, second = ([turn[at] for turn in chats] for at in (0, 1))
        between = f"{min(second) * 1000:.0f} to {max(second) * 1000:.0f}"
        table.add_row(
            system, f"{statistics.median(first) * 1000:.0f}", f"{statistics.median(second) * 1000:.0f}", between
        )
        result[system] = {"first_turn_s": spread(first), "second_turn_s": spread(second)}
    show_table(table)
    save("second_turns", result)


if __name__ == "__main__":
    main()
