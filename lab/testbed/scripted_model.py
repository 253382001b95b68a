"""Makes a real checkpoint whose answers are written beforehand, so that a client's tools are called by a cluster.

Attention and MLP are zero. A token of the script has an axis of its own as its embedding, and the last matrix takes
that axis to the token that follows it. So the last token of the prompt decides the answer, and the chat template
writes that token:

    a tool has the name of a part --> the answers of that part, one after each answer that had calls
    there is no such tool         --> ASIDE, for what clients ask beside (titles, summaries)

An answer that a message of the user follows counts as well, so a part may go on after it. Where answers have reasoning,
between <think> and </think>, the template writes that of earlier turns, too.
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
# An answer has this where one of its tokens ends. In a call that is within a text of the arguments, where more than one
# token may follow: a run that the grammar forces is cut into other tokens, after which the script would not go on.
CUT = "\N{BROKEN BAR}"
# Characters that the template shows of each message, because a byte is a token: of its beginning, and of its end, by
# which a gateway sees that nothing is lost.
SHOWN_CHARS, SHOWN_END_CHARS = 1000, 100
# The logit of the token that follows; all others have none, so sampling changes nothing.
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
# What of the template is for answers with reasoning alone: without such answers a gateway looks for none.
THOUGHT = (
    "{% if message.role == 'assistant' and message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
)


def thought(text: str) -> str:
    """Returns how the model writes what it thinks before an answer."""
    return f"<think>\n{text}\n</think>\n\n"


def called(name: str, arguments: Mapping[str, object]) -> str:
    """Returns how the model writes a call of a tool."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def save_scripted_model(folder: pathlib.Path, script: Mapping[str, Sequence[str]]) -> pathlib.Path:
    """Writes a Llama that gives the answers of each part of ``script``, which is named by its key; returns ``folder``.

    A part is for conversations with a tool of its name, the first part that there is. Its last answer is given again
    where a conversation goes on. No piece between two cuts stands twice in the script.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chains = _chains({**script, "aside": [ASIDE]})
    # A token's name has nothing of a tool's: a gateway breaks what a client sends wherever it could be part of a token.
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
    """Cut each answer into its tokens, after the one that begins it."""
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
    """Writes a Llama of one layer that says after each token the one that ``links`` has."""
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
            # The norm before the last matrix makes an embedding as long as the square root of its size.
            model.get_output_embeddings().weight[following, axis] = LOGIT / hidden_size**0.5
    model.save_pretrained(folder)
