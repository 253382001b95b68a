"""A real checkpoint with predefined answers, so that a cluster calls a client's tools.

Attention and MLP are zero. Each token of the script has its own axis as embedding, which the last matrix maps to the
next token. So the prompt's last token decides the answer, and the chat template writes that token:

    a tool has the name of a part --> that part's answers, one after each answer with calls
    no such tool                  --> ASIDE, for a client's side requests (titles, summaries)

An answer followed by a user message counts as well, so a part may continue after it. With answers that have reasoning,
between <think> and </think>, the template writes that of earlier turns as well.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from lab.testbed.tiny_model import EOS, save_tokenizer

ASIDE = "An aside."
# Marks the end of a token in an answer. In a call, inside a string argument, where more than one token may follow: runs
# forced by the grammar are tokenized differently, and the script would not continue after them.
CUT = "\N{BROKEN BAR}"
# Characters that the template shows of a message, since a byte is a token: of its beginning, and of its end, by which a
# gateway sees that nothing is lost.
SHOWN_CHARS, SHOWN_END_CHARS = 1000, 100
# Logit of the next token; 0 for all others, so sampling changes nothing.
LOGIT = 100.0
TEMPLATE = (
    "{% set said = namespace(part='', calls=0) %}"
    "{% set names = (tools or []) | map(attribute='function.name') | list %}"
    "{% for part in PARTS if part in names and not said.part %}{% set said.part = part %}{% endfor %}"
    "{% if tools %}{{ names | join('\n') + '\nCall them by <tool_call>.\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}THOUGHT"
    "{% set text = message.content or '' %}{{ text[:SHOWN] + text[SHOWN:][-END:] }}"
    "{% if message.role == 'user' and (loop.previtem or message).role == 'assistant' %}"
    "{% set said.calls = said.calls + 1 %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name + call.function.arguments | tojson }}"
    "{% if loop.last %}{% set said.calls = said.calls + 1 %}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if said.part %}{{ '<|script-' + (PARTS[said.part][0] | string) + '-' }}"
    "{{ ([said.calls, PARTS[said.part][1] - 1] | min | string) + '|>' }}"
    "{% else %}<|script-ASIDE-0|>{% endif %}"
)
# Part of the template for answers with reasoning; without it a gateway expects none.
THOUGHT = (
    "{% if message.role == 'assistant' and message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
)


def thought(text: str) -> str:
    """Return the model's text for reasoning before an answer."""
    return f"<think>\n{text}\n</think>\n\n"


def called(name: str, arguments: Mapping[str, object]) -> str:
    """Return the model's text for a tool call."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def save_scripted_model(folder: pathlib.Path, script: Mapping[str, Sequence[str]]) -> pathlib.Path:
    """Write a Llama that generates the answers of each part of ``script`` (by its key) and return ``folder``.

    The first part with the name of one of the conversation's tools is used; its last answer repeats if the conversation
    goes on. No piece between two cuts may occur twice in the script.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chains = _chains({**script, "aside": [ASIDE]})
    # Token names contain no tool name: a gateway splits client text wherever it could be part of a token.
    parts = json.dumps({name: (place, len(answers)) for place, (name, answers) in enumerate(script.items())})
    thinks = any("<think>" in answer for answers in script.values() for answer in answers)
    template = TEMPLATE.replace("PARTS", parts).replace("SHOWN", str(SHOWN_CHARS)).replace("END", str(SHOWN_END_CHARS))
    template = template.replace("THOUGHT", THOUGHT if thinks else "").replace("ASIDE", str(len(script)))
    pieces = tuple(piece for chain in chains for piece in chain[1:])
    save_tokenizer(folder, template, pieces)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens([AddedToken(chain[0], special=True) for chain in chains])
    tokenizer.save(path)
    ids = tokenizer.get_vocab()
    links: dict[int, int] = {}
    for chain in chains:
        links.update(itertools.pairwise(ids[token] for token in (*chain, EOS)))
    _save_weights(folder, len(ids), links)
    return folder


def _chains(script: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Split each answer into its tokens, after its start token."""
    chains = [
        [f"<|script-{place}-{number}|>", *answer.split(CUT)]
        for place, answers in enumerate(script.values())
        for number, answer in enumerate(answers)
    ]
    counts = Counter(piece for chain in chains for piece in chain)
    if twice := [piece for piece, count in counts.items() if count > 1 or len(piece) < 2]:
        raise ValueError(f"the script has no way on from {twice}")
    return chains


def _save_weights(folder: pathlib.Path, vocab_size: int, links: Mapping[int, int]) -> None:
    """Write a Llama of one layer that follows each token with that of ``links``."""
    hidden_size = -(-len(links) // 64) * 64
    shape = {"hidden_size": hidden_size, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": vocab_size, "max_position_embeddings": 65536}
    config = AutoConfig.for_model("llama", **shape, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(parameter.dim() == 1))
        for axis, (token, following) in enumerate(links.items()):
            model.get_input_embeddings().weight[token, axis] = 1.0
            # The final norm scales an embedding to the square root of its size.
            model.get_output_embeddings().weight[following, axis] = LOGIT / hidden_size**0.5
    model.save_pretrained(folder)
