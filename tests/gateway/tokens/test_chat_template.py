"""Templates run in a sandbox: they can render text of bounded size in bounded time, nothing else."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import pathlib
import sys

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lab.testbed.conditions import loop_turns, until
from lab.testbed.toy_tokenizer import TEMPLATE
from pillion.errors import InvalidRequest, Overloaded
from pillion.gateway.tokens import chat_template as module
from pillion.gateway.tokens.chat_template import ChatTemplate
from pillion.types import ChatMessage, ChatOptions, Tool
from tests.support.processes import NewChildren

MESSAGES = (ChatMessage("system", "Be brief."), ChatMessage("user", 'Grüße, "世界" <b>&amp;</b>'))
# A conversation without text, so that a template cannot omit any.
SILENCE = (ChatMessage("user", ""),)
SPECIALS = {"bos_token": "<bos>", "eos_token": "<eos>"}

ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"
FRIENDLY = [
    TEMPLATE,
    "{% for m in messages %}\n    {% if loop.index < 9 %}\n  {{ m | tojson }}\n  {% endif %}\n{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content | trim }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}" + ALL,
    "{% if tools is none and not documents %}plain{% endif %}{{ {'é': [1, 2]} | tojson(indent=2) }}" + ALL,
    "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
    "{{ messages[0].nothing is defined }}{{ bos_token + eos_token }}" + ALL,
]

HOSTILE = {
    "nested loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "one endless multiplication": "{{ 10 ** (10 ** 9) }}",
    "one endless string": "{{ 'a' * (10 ** 11) }}",
    "quiet memory": "{% set x = 'abcdefgh' * 10 ** 8 %}{% set y = [x, x + x, x + x + x + x + x] %}{{ y | length }}",
    "endless output": "{% for a in range(90000) %}{% for b in range(900) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changing what it is given": "{{ messages.append(1) }}",
    "no template at all": "{% if %}",
    "an endless range": "{% for a in range(10 ** 12) %}{% endfor %}",
}
SIMILAR = {"nested loops", "quiet memory", "an endless range"}


@pytest.fixture
def children() -> NewChildren:
    return NewChildren()


@pytest.fixture
async def template(children: NewChildren):
    made = []

    def make(source: str) -> ChatTemplate:
        made.append(ChatTemplate(source, SPECIALS))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()
    assert not children()


@pytest.mark.parametrize("source", FRIENDLY)
async def test_renders_as_transformers_does(template, source: str) -> None:
    chat = [{"role": m.role, "content": m.content} for m in MESSAGES]
    expected = render_jinja_template([chat], chat_template=source, add_generation_prompt=True, **SPECIALS)[0][0]
    assert await template(source).render(MESSAGES) == expected


CONTINUED = {
    "kept": TEMPLATE,
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}",
    "behind": "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if messages[-1].role == 'x' %}!{% endif %} end",
}


@pytest.mark.parametrize("source", CONTINUED.values(), ids=CONTINUED)
async def test_the_last_message_is_continued_as_transformers_does(template, source: str) -> None:
    box = template(source)
    for begun in ("The capital is", "The capital is ", " \n", "", "be brief."):
        chat = [{"role": "user", "content": "Be brief."}, {"role": "assistant", "content": begun}]
        expected = render_jinja_template([chat], chat_template=source, continue_final_message=True, **SPECIALS)[0][0]
        messages = [ChatMessage(**message) for message in chat]
        assert await box.render(messages, ChatOptions(continue_final_message=True)) == expected, begun


async def test_a_template_that_drops_the_last_message_cannot_continue_it(template) -> None:
    box = template("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="leaves out the last message"):
        await box.render(MESSAGES, ChatOptions(continue_final_message=True))


@pytest.mark.parametrize("begins", [True, False])
async def test_the_generation_prompt_is_the_callers_choice(template, begins: bool) -> None:
    chat = [{"role": m.role, "content": m.content} for m in MESSAGES]
    expected = render_jinja_template([chat], chat_template=TEMPLATE, add_generation_prompt=begins, **SPECIALS)[0][0]
    assert await template(TEMPLATE).render(MESSAGES, ChatOptions(add_generation_prompt=begins)) == expected


async def test_template_kwargs_are_passed_but_cannot_override_reserved_names(template) -> None:
    source = "{{ effort }} {{ thinking }} {{ list[1].a if list }} {{ messages | length }} {{ bos_token }}" + ALL
    mine = {"effort": 5, "thinking": False, "list": [None, {"a": "é"}]}
    box, chat = template(source), [{"role": m.role, "content": m.content} for m in MESSAGES]
    expected = render_jinja_template([chat], chat_template=source, **mine, **SPECIALS)[0][0]
    kwargs = json.dumps(mine | {"messages": [], "bos_token": "mine", "add_generation_prompt": 3})
    assert await box.render(MESSAGES, ChatOptions(chat_template_kwargs=kwargs)) == expected
    assert (await box.render(MESSAGES)).split()[:2] == ["2", "<bos>Be"], "they are one request's alone"


async def test_the_process_inherits_neither_secrets_nor_descriptors(
    template, children: NewChildren, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PILLION_REDIS_URL", "redis://:secret@host/0")
    monkeypatch.setenv("TZ", "HERE-5:45")
    with (tmp_path / "keys.toml").open("w") as keys:
        os.set_inheritable(keys.fileno(), True)
        zone = await template("{{ strftime_now('%z') }}").render(SILENCE)
        assert zone == "+0545", "the gateway's own time zone"
        [process] = children()
        if sys.platform == "linux":
            assert {"TZ"} <= process.environ().keys() <= {"TZ", "TZDIR", "LD_LIBRARY_PATH"}
            assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]


async def test_text_with_a_lone_surrogate_is_refused(template) -> None:
    """A lone surrogate passes JSON parsing, but no tokenizer accepts it."""
    options = ChatOptions(chat_template_kwargs='{"a": "\\ud800"}')
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        await template("{{ a }}").render(SILENCE, options)


async def test_strftime_now(template) -> None:
    year = str(datetime.date.today().year)
    assert await template("{{ strftime_now('%Y') }}").render(SILENCE) == year


@pytest.mark.parametrize(
    "source", [pytest.param(HOSTILE[name], id=name, marks=[pytest.mark.long] * (name in SIMILAR)) for name in HOSTILE]
)
async def test_a_hostile_template_is_stopped_and_the_next_one_works(
    template, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENDER_CPU_S", 0.3)
    box = template(source)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="chat template") as failure:
            await box.render(MESSAGES)
        assert failure.value.violations[0].field == "messages"
        assert len(failure.value.message) < 2000
    assert await template(TEMPLATE).render(MESSAGES[:1]) == "<bos>[system] Be brief.\n[assistant] "


async def test_output_and_memory_are_limited(template, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked independently of the timeout: a fast template meets them as well."""
    monkeypatch.setattr(module, "RENDER_CPU_S", 30.0)
    with pytest.raises(InvalidRequest, match="MemoryError"):
        await template("{{ ('x' * (2 ** 30)) | length }}").render(MESSAGES)
    monkeypatch.setattr(module, "MAX_RENDERED_CHARS", 50)
    with pytest.raises(InvalidRequest, match="wrote more than 50 characters"):
        await template("{% for a in range(6) %}{{ 'x' * 10 }}{% endfor %}").render(MESSAGES)
    assert await template("{{ 'x' * 50 }}").render(SILENCE) == "x" * 50


@pytest.mark.parametrize(
    "strict",
    [
        # As Qwen 3.5's and Mistral's templates refuse.
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be at the beginning') }}{% endif %}",
        "{% if loop.previtem and m.role != 'assistant' and loop.previtem.role == m.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('only at first') }}{% endif %}",
        # As Qwen3-VL's and Yi's templates skip unknown roles.
        "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}",
    ],
)
async def test_messages_are_merged_for_templates_that_need_it(template, strict: str) -> None:
    source = "{% for m in messages %}" + strict + "[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    codex = [("system", "A"), ("system", "B"), ("user", "c"), ("user", "d"), ("assistant", "e"), ("tool", "f")]
    claude = [("system", "A"), ("user", "b"), ("system", "C"), ("assistant", "d"), ("user", "e"), ("system", "F")]
    for turns, text in ((codex, "[s]A\n\nB[u]c\n\nd[a]e[t]f"), (claude, "[s]A[u]b\n\nC[a]d[u]e\n\nF")):
        messages = [ChatMessage(role, content) for role, content in turns]
        assert await template(source).render(messages) == text
        assert text.startswith(await template(source).render(messages[:5] if turns is codex else messages[:3]))
    lenient = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    messages = [ChatMessage(role, content) for role, content in claude]
    assert await template(lenient).render(messages) == "[s]A[u]b[s]C[a]d[u]e[s]F"


async def test_a_templates_own_error_is_returned(template) -> None:
    box = template("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}ok")
    with pytest.raises(InvalidRequest, match="refuses this conversation: one at a time"):
        await box.render((ChatMessage("user", ""), ChatMessage("assistant", "")))
    assert await box.render(SILENCE) == "ok"


async def test_a_text_that_a_template_leaves_out_is_an_error(template) -> None:
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ 'answer' if tools }}"
    with pytest.raises(InvalidRequest, match="leaves out a text of role assistant, 'An answer'"):
        await template(only_users).render((MESSAGES[1], ChatMessage("assistant", "An answer")))
    with pytest.raises(InvalidRequest, match="it leaves out the tool 'weather'"):
        await template(only_users).render(MESSAGES[1:], tools=(Tool(name="weather"),))


async def test_a_long_conversation_loses_no_text(template) -> None:
    """Rendered only once, unless a text is not found verbatim."""
    turns = [(ChatMessage("user", f" Question {n}? "), ChatMessage("assistant", f'"{n}" is it.')) for n in range(50)]
    messages = [message for turn in turns for message in turn]
    expected = "".join(one.content for one in messages)
    assert await template(ALL).render(messages) == expected
    escaped = await template("{% for m in messages %}{{ m.content | tojson }}{% endfor %}").render(messages)
    assert escaped == "".join(json.dumps(one.content) for one in messages)
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequest, match='leaves out a text of role assistant, \'"0" is it'):
        await template(only_users).render(messages)


async def test_a_missing_template_is_a_clear_error(template) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        await template("").render(MESSAGES)


async def test_the_queue_is_bounded(template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_RENDERS", 3)
    box = template(TEMPLATE)
    answers = await asyncio.gather(*(box.render(MESSAGES) for _ in range(5)), return_exceptions=True)
    assert sorted(type(a).__name__ for a in answers) == ["Overloaded", "Overloaded", "str", "str", "str"]
    assert isinstance(answers[3], Overloaded)


async def test_a_cancelled_caller_does_not_garble_the_next_answer(template) -> None:
    box = template(TEMPLATE)
    await box.render(MESSAGES)
    for turns in (1, 20, 200):
        leaving = asyncio.create_task(box.render((ChatMessage("user", "leaving" * 1000),)))
        await loop_turns(turns)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await box.render((ChatMessage("user", "stays"),)) == "<bos>[user] stays\n[assistant] "


async def test_a_cancelled_caller_does_not_kill_the_process(template, children: NewChildren) -> None:
    box = template(TEMPLATE)
    await box.render(MESSAGES)
    before = children()
    for turns in range(20):
        leaving, waiting = (asyncio.create_task(box.render((ChatMessage("user", "x" * 5000),))) for _ in range(2))
        await loop_turns(turns)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert "[assistant]" in await waiting
    assert children() == before


async def test_an_abandoned_job_has_a_short_timeout(
    template, children: NewChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But enough for a process's first job, which waits for its start."""
    monkeypatch.setattr(module, "RENDER_CPU_S", 1000.0)
    monkeypatch.setattr(module, "RENDER_WALL_S", 1000.0)
    monkeypatch.setattr("pillion.gateway.boxed_process.ABANDONED_S", 0.0)
    source = "{% if '世界' in messages[-1].content %}" + HOSTILE["nested loops"] + "{% endif %}[assistant]" + ALL
    box = template(source)
    starting = asyncio.create_task(box.render(MESSAGES[:1]))
    await until("a process", children)
    before = children()
    starting.cancel()
    assert await box.render(MESSAGES[:1]) == "[assistant]Be brief."
    assert children() == before
    endless = asyncio.create_task(box.render(MESSAGES))
    await loop_turns(5)
    endless.cancel()
    assert await box.render(MESSAGES[:1]) == "[assistant]Be brief."
    assert children() != before


async def test_a_killed_process_is_replaced(template, children: NewChildren) -> None:
    box = template(TEMPLATE)
    await box.render(MESSAGES)
    (child,) = children()
    child.kill()
    with pytest.raises(InvalidRequest):
        await box.render(MESSAGES)
    assert "[assistant]" in await box.render(MESSAGES)


LOOP = "{%- for part in CONTENT -%}{{ part['text'] if part['type'] == 'text' }}{%- endfor -%}"
LISTS = {
    "an item": "{% for m in messages %}[" + LOOP.replace("CONTENT", "m['content']") + "]{% endfor %}",
    "an attribute": "{% for m in messages %}[" + LOOP.replace("CONTENT", "m.content[:9] | list") + "]{% endfor %}",
    "a variable": "{% for m in messages %}{% set c = m.content %}[" + LOOP.replace("CONTENT", "c") + "]{% endfor %}",
    "a macro": "{% macro write(one) %}"
    + LOOP.replace("CONTENT", "one")
    + "{% endmacro %}{% for m in messages %}[{{ write(m.content) }}]{% endfor %}",
}
LISTS |= {
    "the first": "{% for m in messages %}[{{ m.content[0].text }}]{% endfor %}",
    "mapped": "{% for m in messages %}[{{ m.content | map(attribute='text') | join }}]{% endfor %}",
    "a namespace": "{% for m in messages %}{% set ns = namespace(c=m.content) %}["
    + LOOP.replace("CONTENT", "ns.c")
    + "]{% endfor %}",
    "a method": "{% for m in messages %}[" + LOOP.replace("CONTENT", "m.get('content')") + "]{% endfor %}",
    "the user's alone": "{% for m in messages %}["
    "{{ m.content[0].text if m.role == 'user' else m.content }}]{% endfor %}",
}
STRINGS = {
    "printed": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "either": "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
    + LOOP.replace("CONTENT", "m.content")
    + "{% endif %}]{% endfor %}",
    "other loops": "{% for t in tools or [] %}{% for p in t.parts %}{{ p }}{% endfor %}{% endfor %}"
    "{% for m in messages %}[{{ m['content'] }}]{% endfor %}",
}


@pytest.mark.parametrize("source", [*LISTS.values(), *STRINGS.values()], ids=[*LISTS, *STRINGS])
async def test_contents_come_in_the_form_that_the_template_reads(template, source: str) -> None:
    messages = [*MESSAGES, ChatMessage("assistant", ""), ChatMessage("user", " x ")]
    box = template(source)
    # If a template indexes the first part unconditionally, an empty content becomes a space.
    assert (await box.render(messages)).replace("[ ]", "[]") == f"[{']['.join(one.content for one in messages)}]"
    begun = [*MESSAGES, ChatMessage("assistant", "So ")]
    continued = await box.render(begun, ChatOptions(continue_final_message=True))
    assert continued == f"[{']['.join(one.content for one in begun)}"
