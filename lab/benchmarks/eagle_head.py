"""A small EAGLE-3 head, trained in minutes on a model's own answers; and what its draft tokens lose without context.

    python -m lab.benchmarks.eagle_head FOLDER && python -m lab.benchmarks.drafts --eagle-head FOLDER

The head begins with the model's embedding, its final norm, the most frequent rows of its LM head and the MLP of its
last layer. It learns what the model expects after each token of its answers, half of them sampled and half greedy
unless --temperatures says otherwise: by the model's states, and, as where it drafts on, by its own (the training-time
test of EAGLE-3). Right draft tokens are counted on texts that it has not seen, by how many entries are after a draft
token: a head whose chain begins with a prompt's tail has only those of the tail. Draft tokens are chosen as a worker
chooses them, with the noise of the draft token.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from lab.benchmarks.drafts import prompt_of
from lab.benchmarks.report import save, show_table
from lab.testbed.eagle_heads import head_config, write_head
from lab.testbed.plain_model import plain_folder
from pillion import LLM, SamplingParams
from pillion.engine.sampling.sampler import sample
from pillion.kernels.step import SamplingRows

CONTEXTS = (1, 4, 16, 64, 256)
# Texts take turns: every other one is greedy, the rest is sampled.
TEMPERATURES = (0.0, 1.0)
FIRST_STREAM, HELD_OUT = 100, 12
LEARNING_RATE, WARMUP_SHARE = 1e-3, 0.05
# Those of each pass, [heads, entries, head_dim].
KeysAndValues = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Answered:
    """A text [T], the states [T, 3 * hidden] that a head reads, and the last layer's normed output [T, hidden]; and how
    its tokens were chosen."""

    tokens: torch.Tensor
    states: torch.Tensor
    outputs: torch.Tensor
    temperature: float
    seed: int
    prompt_tokens: int

    def from_tail(self) -> Answered:
        """Returns the text as a head sees it: whole, or, every other time, from somewhere in its prompt on. The part of
        a prompt that comes from the cache, or from another worker, has no states."""
        first = random.randrange(2 * self.prompt_tokens) - self.prompt_tokens
        if first <= 0:
            return self
        parts = (self.tokens[first:], self.states[first:], self.outputs[first:])
        return Answered(*parts, self.temperature, self.seed, self.prompt_tokens - first)


class TrainedHead(nn.Module):
    """A head in float32. Its parameters have the names of ``speculators``."""

    def __init__(self, config: dict[str, Any], embedding: torch.Tensor, begin: dict[str, torch.Tensor]) -> None:
        """``begin``: weights to begin with; the others are random."""
        super().__init__()
        layer = config["transformer_layer_config"]
        hidden, inner = layer["hidden_size"], layer["intermediate_size"]
        self.head_dim, self.eps = layer["head_dim"], layer["rms_norm_eps"]
        heads, keys = layer["num_attention_heads"] * self.head_dim, layer["num_key_value_heads"] * self.head_dim
        self.theta, self.embedding = layer["rope_theta"], embedding
        shapes = {
            "fc": (hidden, 3 * hidden),
            "layers.0.self_attn.q_proj": (heads, 2 * hidden),
            "layers.0.self_attn.k_proj": (keys, 2 * hidden),
            "layers.0.self_attn.v_proj": (keys, 2 * hidden),
            "layers.0.self_attn.o_proj": (hidden, heads),
            "layers.0.mlp.gate_proj": (inner, hidden),
            "layers.0.mlp.up_proj": (inner, hidden),
            "layers.0.mlp.down_proj": (hidden, inner),
        }
        norms = ("layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm")
        weights = {name: torch.randn(rows, columns) / columns**0.5 for name, (rows, columns) in shapes.items()}
        weights |= {name: torch.ones(hidden) for name in norms} | {name: one.clone() for name, one in begin.items()}
        self.weights = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(one) for name, one in weights.items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the trained weights by their names in files."""
        return {f"{name.replace('/', '.')}.weight": one.detach().bfloat16() for name, one in self.weights.items()}

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self._times(states, "fc")

    def forward(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        cache: KeysAndValues,
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries of ``states`` and ``tokens``: the states of the next pass, and logits. ``cache`` has the keys and
        values of the passes before, ``mask`` [entries, passes * entries] what each entry sees."""
        embedded = self._norm(self.embedding[tokens], "layers.0.input_layernorm")
        rows = torch.cat((embedded, self._norm(states, "layers.0.hidden_norm")), -1)
        q, k, v = (
            self._times(rows, f"layers.0.self_attn.{name}_proj").view(len(rows), -1, self.head_dim).transpose(0, 1)
            for name in "qkv"
        )
        # Pass p runs entry i for position i + p.
        places = torch.arange(len(rows)) + len(cache)
        cache.append((self._rotated(k, places), v))
        keys, values = (torch.cat(both, 1)[None] for both in zip(*cache, strict=True))
        found = scaled_dot_product_attention(self._rotated(q, places)[None], keys, values, mask, enable_gqa=True)
        hidden = states + self._times(found[0].transpose(0, 1).flatten(1), "layers.0.self_attn.o_proj")
        inner = self._norm(hidden, "layers.0.post_attention_layernorm")
        gated = silu(self._times(inner, "layers.0.mlp.gate_proj")) * self._times(inner, "layers.0.mlp.up_proj")
        hidden = hidden + self._times(gated, "layers.0.mlp.down_proj")
        return hidden, self._times(self._norm(hidden, "norm"), "lm_head")

    def _times(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        found: torch.Tensor = rows @ self.weights[name.replace(".", "/")].T
        return found

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        scale: torch.Tensor = (
            torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.eps) * self.weights[name.replace(".", "/")]
        )
        return rows * scale

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * self.theta ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        first, second = heads.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
        found: torch.Tensor = heads * angles.cos().repeat(1, 2) + turned * angles.sin().repeat(1, 2)
        return found


def seen(entries: int, number: int, context: int) -> torch.Tensor:
    """bool [entries, (number + 1) * entries]: entry i of pass ``number`` sees true entries up to i, of which the last
    ``context``, and the one entry of each pass since that its own draft token is behind."""
    i, k = torch.arange(entries)[:, None], torch.arange(entries)
    true = (k <= i) & (k > i - context)
    return torch.cat((true, *(k == i for _ in range(number))), 1)


def answered(
    folder: pathlib.Path, model: str, texts: int, tokens: int, temperatures: Sequence[float], threads: int
) -> list[Answered]:
    """Returns the model's answers to ``texts`` prompts, with one temperature after the other, and what it computes for
    them."""
    params = [
        SamplingParams(
            temperature=temperatures[number % len(temperatures)], seed=number, max_tokens=tokens, ignore_eos=True
        )
        for number in range(texts)
    ]
    prompts = [prompt_of("ordinary", FIRST_STREAM + number) for number in range(texts)]
    with LLM(model, max_num_seqs=16, cpu_threads=threads, max_model_len=2048) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    main = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    layers, found = main.config.num_hidden_layers, []
    with torch.inference_mode():
        for output, chosen in zip(outputs, params, strict=True):
            prompt = output.prompt_token_ids or ()
            text = torch.tensor([*prompt, *output.outputs[0].token_ids])
            hidden = main.model(text[None], output_hidden_states=True).hidden_states
            states = torch.cat([hidden[layer][0] for layer in (2, layers // 2, layers - 3)], -1)
            found.append(
                Answered(text, states, hidden[-1][0], chosen.temperature or 0.0, chosen.seed or 0, len(prompt))
            )
    return found


def chosen(text: Answered, logits: torch.Tensor, ids: torch.Tensor, vocab_size: int, first: int) -> torch.Tensor:
    """Returns the draft tokens of the text's tokens from ``first`` on, as a worker chooses them by a head's logits."""
    wide = torch.full((len(logits), vocab_size), -torch.inf)
    wide[:, ids] = logits
    count = len(logits)
    params = [SamplingParams(temperature=text.temperature)] * count
    rows = SamplingRows.of(params, [text.seed] * count, range(first, first + count))
    return torch.tensor(sample(wide, rows).token_ids)


def right_draft_tokens(
    head: TrainedHead, ids: torch.Tensor, texts: list[Answered], context: int, passes: int
) -> list[float]:
    """Returns the share of an answer's tokens at each place of a draft that are right, given those before them."""
    right, tried = [0] * passes, [0] * passes
    with torch.inference_mode():
        for text in texts:
            states = head.fuse(text.states[: -passes - 1].float())
            cache: KeysAndValues = []
            # Tokens of the prompt were not chosen.
            good = torch.arange(len(states)) + 2 >= text.prompt_tokens
            for number in range(passes):
                following = text.tokens[1 + number :][: len(states)]
                states, logits = head(states, following, cache, seen(len(states), number, context))
                tried[number] += int(good.sum())
                draft_tokens = chosen(text, logits, ids, len(head.embedding), 2 + number)
                good &= draft_tokens == text.tokens[2 + number :][: len(states)]
                right[number] += int(good.sum())
    return [mine / max(all_, 1) for mine, all_ in zip(right, tried, strict=True)]


def loss_of(head: TrainedHead, target_rows: torch.Tensor, text: Answered, passes: int) -> torch.Tensor:
    """Returns how far the head's draft tokens at each place are from what the model expects there; later places count
    less."""
    expected = (text.outputs @ target_rows.T).float().softmax(-1)
    with torch.autocast("cpu", torch.bfloat16):
        states, loss = head.fuse(text.states[: -passes - 1].float()), torch.zeros(())
        cache: KeysAndValues = []
        for at in range(passes):
            count = len(states)
            states, logits = head(states, text.tokens[1 + at :][:count], cache, seen(count, at, count))
            # The model's output one position after an entry's state says what it expects after the entry's token.
            loss = loss + 0.8**at * cross_entropy(logits.float(), expected[1 + at :][:count])
    return loss


def train(
    head: TrainedHead,
    ids: torch.Tensor,
    target_head: torch.Tensor,
    texts: list[Answered],
    limit_s: float,
    passes: int,
) -> None:
    """Has the head expect what the model does, place after place of a draft, for so many seconds."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rows, began_s, done, losses = target_head[ids], time.monotonic(), 0.0, [0.0]
    while done < 1:
        for place in torch.randperm(len(texts)).tolist():
            loss = loss_of(head, rows, texts[place].from_tail(), passes)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, done / WARMUP_SHARE) * (1 - done)
            optimizer.zero_grad()
            torch.autograd.backward([loss])
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            done = (time.monotonic() - began_s) / limit_s
            if done >= 1:
                break
        recent = losses[-len(texts) :]
        print(f"{min(done, 1):.0%}, {len(losses) - 1} texts: loss {sum(recent) / len(recent):.3f}", flush=True)


def begin_with(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights of the model that a head begins with."""
    last = model.model.layers[-1]
    found = {"lm_head": model.get_output_embeddings().weight[ids], "norm": model.model.norm.weight}
    found["layers.0.post_attention_layernorm"] = last.post_attention_layernorm.weight
    found |= {f"layers.0.mlp.{name}_proj": getattr(last.mlp, f"{name}_proj").weight for name in ("gate", "up", "down")}
    return {name: one.detach().float() for name, one in found.items()}


def main() -> None:
    """Train, write the head to FOLDER and the shares to results/eagle_head.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES, help="of the answers, in turn")
    parser.add_argument("--minutes", type=float, default=12.0, help="of training, after the answers")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--draft-vocab-size", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(args.threads)
    folder = plain_folder(args.model)
    texts = answered(folder, args.model, args.texts, args.tokens, args.temperatures, args.threads)
    held_out, known = texts[:HELD_OUT], texts[HELD_OUT:]
    counts = Counter(token for text in known for token in text.tokens.tolist())
    ids = torch.tensor(sorted(token for token, _ in counts.most_common(args.draft_vocab_size)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    raw = json.loads((folder / "config.json").read_text())
    raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    raw.setdefault("rope_theta", (raw.get("rope_parameters") or {}).get("rope_theta", 10_000.0))
    config = head_config(raw, "llama", len(ids), None, before=False)
    target_head = model.get_output_embeddings().weight.detach()
    head = TrainedHead(config, model.get_input_embeddings().weight.detach().float(), begin_with(model, ids))
    train(head, ids, target_head, known, 60 * args.minutes, args.passes)
    tensors = head.tensors()
    write_head(args.folder, config, {**tensors, "d2t": ids - torch.arange(len(ids))})
    shares = {
        f"{temperature:g}": {
            str(context): right_draft_tokens(
                head, ids, [one for one in held_out if one.temperature == temperature], context, 3
            )
            for context in CONTEXTS
        }
        for temperature in args.temperatures
    }
    table = Table("temperature", "entries", "first", "second", "third", title="right drafts by entries after them")
    for temperature, of_context in shares.items():
        for context, found in of_context.items():
            table.add_row(temperature, context, *(f"{share:.0%}" for share in found))
    show_table(table)
    print(f"written to {args.folder} and {save('eagle_head', {'model': args.model, 'shares': shares})}")


if __name__ == "__main__":
    main()
