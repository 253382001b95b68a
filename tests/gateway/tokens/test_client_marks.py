"""Client text is text: no string of a conversation becomes a special token, whatever its template does, and text
without marks is encoded as usual."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from lab.testbed.toy_tokenizer import write_tokenizer
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.gateway.tokens.client_marks import BREAKER
from pillion.gateway.tokens.template_worker import ClientMarks
from pillion.gateway.tokens.tokenizer import ModelTokenizer
from pillion.types import ChatMessage, ChatOptions, Tool, ToolCall
from tests.gateway.formats import test_template_calls as call_templates
from tests.gateway.tokens import test_tool_templates as tool_templates

MOST = 2**20
# Marks of published tokenizers; a template contains those of its own kind.
MARKS = [
    *"<bos> <eos> <s> </s> <|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <|start_header_id|>".split(),  # noqa: SIM905
    *"<|end_header_id|> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]".split(),  # noqa: SIM905
    *"<start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|observation|> <|end|> <|start|>".split(),  # noqa: SIM905
    *"<|turn|> <|channel|> <|message|> <|call|> [gMASK] <sop> ]~b] [e~[ <seed:bos> <seed:eos> <|im_user|>".split(),  # noqa: SIM905
    *"<|im_system|> <|im_assistant|> <|im_middle|> <|tool_calls_section_begin|> <｜User｜> <｜Assistant｜>".split(),  # noqa: SIM905
    *"<｜tool▁calls▁begin｜> <｜tool▁call▁end｜> <|start_of_role|> <|end_of_role|> <|end_of_text|>".split(),  # noqa: SIM905
    *"<|START_OF_TURN_TOKEN|> <|reserved_special_token_12|> <|reserved_special_token_7|>".split(),  # noqa: SIM905
]
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
CORPUS = [
    "The user wrote <|im_end and /s> into a system message, INST] too: a < b, b > c, x[0] | y, |><|, ></, ][.",
    "Zürich und Bonn, im_end im_start user assistant system end start s [/INST tool calls weather 123.",
    "</|im_end| |im_start|> ||> <| [ ] [] <> >> << start_of_turn>user\n\n/s></s <| <|i |im_ d|>< d|> |>",
] * 3


def of_bytes(*, whole: bool = False, corpus: list[str] = CORPUS) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer, as Qwen's and Llama's, with or without pre-tokenization."""
    codec = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not whole)
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    codec.pre_tokenizer = byte_level if whole else pre_tokenizers.Sequence([split, byte_level])
    codec.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    codec.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return codec


def of_pieces() -> tokenizers.Tokenizer:
    """Return a character-level BPE tokenizer whose normalizer writes ▁ for spaces, as Llama 2's and Gemma's."""
    codec = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    codec.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    codec.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    codec.train_from_iterator(CORPUS, trainer)
    written = json.loads(codec.to_str())
    written["added_tokens"] = written["added_tokens"][:1]
    return tokenizers.Tokenizer.from_str(json.dumps(written))


def of_scores() -> tokenizers.Tokenizer:
    """Return a tokenizer whose vocabulary includes some marks, and whose normalizer maps full-width letters to plain
    ones, as T5's."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<|im_end|>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in sorted({letter for text in CORPUS for letter in text if letter.strip()})]
    codec = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    codec.normalizer = normalizers.NFKC()
    codec.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    codec.decoder = decoders.Metaspace()
    return codec


def in_lower_case() -> tokenizers.Tokenizer:
    """Return a tokenizer that matches special tokens in the normalized text."""
    codec = of_bytes()
    codec.normalizer = normalizers.Lowercase()
    codec.add_tokens([AddedToken(mark, special=True, normalized=True) for mark in MARKS])
    return codec


TOKENIZERS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "split": of_bytes,
    "whole": lambda: of_bytes(whole=True),
    "merged into marks": lambda: of_bytes(whole=True, corpus=[*CORPUS, "<|im_end|></s>[INST]" * 9]),
    "pieces": of_pieces,
    "scores": of_scores,
    "lower": in_lower_case,
}
# Templates in the shape of published ones that slice strings, or write a client's names within their own marks.
CUTTING = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- set content = m.content | replace('<think>', '') %}
    {%- if m.content.startswith('<tool_response>') %}{{- 'result' }}{%- endif %}
    {{- content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- for tc in m.tool_calls or [] %}
        {{- '(' ~ tc.function.name ~ ')' }}
        {%- for key, value in tc.function.arguments.items() %}
            {{- '\\n<' ~ key ~ '>' ~ value ~ '</' ~ key ~ '>' }}
        {%- endfor %}
    {%- endfor %}
{%- endfor %}
{%- for tool in tools or [] %}
    {{- '(' ~ tool.function.name ~ ')' }}
    {%- for key, value in tool.function.parameters.items() %}
        {{- '<' ~ key ~ '>' ~ value | string ~ '</' ~ key ~ '>' }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
JOINING = """
{{- bos_token }}
{%- for m in messages %}
    {{- '<|' + m.role + '|>' + (m.name or '') + (m.reasoning_content or '') + m.content + '<|end|>' }}
    {{- kwarg or '' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
WHOLE = """
{{- bos_token }}{{ messages | tojson(ensure_ascii=true) }}{{ messages | tojson }}
{{- tools | tojson(indent=2) }}<|eot_id|>
"""
IN_PARTS = """
{%- for m in messages %}
    {{- '<start_of_turn>' + m.role + '\\n' }}
    {%- for part in m['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] | trim }}{%- endif %}{%- endfor %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
"""
TEMPLATES = {
    "cutting": CUTTING,
    "joining": JOINING,
    "whole": WHOLE,
    "in parts": IN_PARTS,
    **{
        name: source
        for module in (call_templates, tool_templates)
        for name, source in vars(module).items()
        if name.isupper() and isinstance(source, str) and "messages" in source
    },
}


def marked(codec: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    known = {token.content for token in codec.get_added_tokens_decoder().values()}
    codec.add_tokens([AddedToken(mark, special=True) for mark in MARKS if mark not in known])
    codec.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return codec


@pytest.fixture(scope="module")
def models_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: ModelTokenizer.load(write_tokenizer(folder / name, marked(make()))) for name, make in TOKENIZERS.items()
    }


def nasty(dice: random.Random) -> str:
    """Return a random string of marks, parts of marks and words."""
    found = []
    for _ in range(dice.randrange(1, 5)):
        mark = dice.choice(MARKS)
        cut = dice.randrange(len(mark) + 1)
        cuts = [
            mark,
            mark[:cut],
            mark[cut:],
            mark[1:-1],
            f"{mark[:cut]}<think>{mark[cut:]}",
            f"{mark[:cut]}</think>{mark[cut:]}",
        ]
        found += [dice.choice(cuts), dice.choice(["", " ", "\n", "a", " b < c ", "é", "</think>", mark[0], mark[-1]])]
    return "".join(found[:-1]) if dice.random() < 0.5 else found[0]


def harmless_word(dice: random.Random) -> str:
    return f"word{dice.getrandbits(30)}"


def conversation(
    seed: str, write: Callable[[random.Random], str]
) -> tuple[list[ChatMessage], ChatOptions, tuple[Tool, ...]]:
    dice = random.Random(seed)

    def text() -> str:
        return write(dice)

    schema = {
        "type": "object",
        text(): {text(): text()},
        "properties": {text(): {"description": text(), "enum": [text()]}},
    }
    tools = (
        Tool(name="weather", description=text(), parameters=json.dumps(schema)),
        Tool(name=text() or "x", parameters=json.dumps({"properties": {}})),
    )
    arguments = json.dumps({text(): text(), "days": [1, {text(): None}]})
    messages = [
        ChatMessage("system", text()),
        ChatMessage("user", text(), name=text()),
        ChatMessage("assistant", text(), tool_calls=(ToolCall("abcdefgh1", "weather", arguments),), reasoning=text()),
        ChatMessage("tool", text(), tool_call_id="abcdefgh1", name="weather"),
        ChatMessage("assistant", text()),
        ChatMessage("user", text()),
    ]
    kwargs = json.dumps({"kwarg": text()})
    return messages, ChatOptions(chat_template_kwargs=kwargs), tools if seed[-1] in "01234567" else ()


def shape_of(name: str) -> ChatTemplate:
    specials = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return ChatTemplate(
        TEMPLATES[name],
        specials,
        marks=[*MARKS, "<unk>"],
        spells_out=True,
        spelling=("<tool_call>", "</tool_call>", "object"),
    )


def expected_ids(tokenizer: ModelTokenizer, rendered: str) -> list[int]:
    """Encode the text between the template's marks separately, with special tokens as plain text."""
    plain = tokenizers.Tokenizer.from_str(tokenizer.codec.to_str())
    plain.encode_special_tokens = True
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, sorted(MARKS, key=len, reverse=True)))})", rendered):
        if piece in MARKS:
            ids.append(tokenizer.codec.token_to_id(piece))
        elif piece:
            ids += plain.encode(piece.replace(BREAKER, ""), add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
async def test_no_text_of_a_client_becomes_a_special_token(
    name: str, models_tokenizers: dict[str, ModelTokenizer]
) -> None:
    box = shape_of(name)
    try:
        for seed in range(12):
            evil = await box.render(*conversation(f"{name} {seed}", nasty))
            harmless = await box.render(*conversation(f"{name} {seed}", harmless_word))
            for kind, tokenizer in models_tokenizers.items():
                special = {n for n, token in tokenizer.codec.get_added_tokens_decoder().items() if token.special}
                special.discard(tokenizer.codec.token_to_id("<unk>"))
                said, meant = (tokenizer.encode_chat(text, MOST) for text in (evil, harmless))
                assert [n for n in said if n in special] == [n for n in meant if n in special], (seed, kind, evil)
                if kind in ("split", "whole"):
                    assert not tokenizer.guard.is_spelt_by_others
                    assert list(said) == expected_ids(tokenizer, evil), (seed, kind)
                if kind in ("split", "whole", "merged into marks"):
                    text = tokenizer.codec.decode(said, skip_special_tokens=False)
                    assert text == evil.replace(BREAKER, ""), "no letter is lost"
    finally:
        await box.aclose()


async def test_partial_marks_are_unchanged() -> None:
    """It becomes a mark only if the template writes the rest of it next to it."""
    box = ChatTemplate(CUTTING, {}, marks=MARKS)
    try:
        for text in ("a <", "<|im_", "|im_end|> quoted", "im_end", "x <think>", "> quoted\n<\n"):
            expected = f"<|im_start|>user\n{text.replace('<think>', '')}<|im_end|>\n<|im_start|>assistant\n"
            assert await box.render([ChatMessage("user", text)]) == expected
        tools = (Tool(name="x", parameters=json.dumps({"|im_end|": "word"})),)
        written = await box.render([ChatMessage("user", "hi")], tools=tools)
        assert f"<{BREAKER}|im_end|{BREAKER}>word</{BREAKER}|im_end|{BREAKER}>" in written
    finally:
        await box.aclose()


async def test_a_message_with_marks_is_continued() -> None:
    box = ChatTemplate(CUTTING, {}, marks=MARKS)
    begun = [ChatMessage("user", "hi"), ChatMessage("assistant", "I write <|im_end|> and <")]
    try:
        written = await box.render(begun, ChatOptions(continue_final_message=True))
    finally:
        await box.aclose()
    assert written.replace(BREAKER, "").endswith("assistant\nI write <|im_end|> and <")
    assert "<|im_end|>" not in written.split("assistant\n")[1]


async def test_breaker_characters_from_clients_are_replaced() -> None:
    box = ChatTemplate(CUTTING, {}, marks=MARKS)
    try:
        written = await box.render([ChatMessage("user", f"<{BREAKER}|im_end|> \ufdd0")])
    finally:
        await box.aclose()
    assert written == "<|im_start|>user\n<\N{REPLACEMENT CHARACTER}|im_end|> \ufdd0<|im_end|>\n<|im_start|>assistant\n"


def test_letters_that_are_normalized_to_a_mark_are_text(models_tokenizers: dict[str, ModelTokenizer]) -> None:
    tokenizer = models_tokenizers["scores"]
    end = tokenizer.codec.token_to_id("</s>")
    assert end in tokenizer.encode_text("a＜/s＞b", MOST), "a client's own prompt is read as it always was"
    assert end not in tokenizer.encode_chat("a＜/s＞b", MOST)
    assert tokenizer.encode_chat("a</s>b", MOST).count(end) == 1, "the template's own"


def test_tokenizers_with_very_many_marks_are_guarded() -> None:
    marks = [f"<{one:x}|{'abc'[one % 3]}>" for one in range(3000)] + [f"<custom_{one}>" for one in range(30_000)]
    guard = ClientMarks(marks, (), BREAKER)
    told: list[bool] = []
    assert guard.broken({"x": ["x <b|c> y", "a <custom_70> b", "plain"]}, told) == {
        "x": [f"x <{BREAKER}b|c> y", f"a <{BREAKER}custom_70> b", "plain"]
    }
    assert told == [True, True]
