"""Text to ids: special tokens as configured, never two BOS, templates wherever models store them."""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import threading

import pytest

from lab.testbed.conditions import WITHIN_S, loop_turns, until
from lab.testbed.toy_tokenizer import byte_tokenizer, with_bos, write_tokenizer
from pillion.errors import ConfigError, Overloaded
from pillion.gateway.tokens import tokenizer as module
from pillion.gateway.tokens.tokenizer import MAX_TEMPLATE_BYTES, ModelTokenizer, TokenizerPool

BOS, EOS = 256, 257
MOST = 2**20


def test_no_bos_is_added_if_the_tokenizer_adds_none(tmp_path: pathlib.Path) -> None:
    tokenizer = ModelTokenizer.load(write_tokenizer(tmp_path, byte_tokenizer()))
    assert not tokenizer.adds_bos
    assert BOS not in tokenizer.encode_text("hi", MOST)
    assert tokenizer.encode_text("<bos><bos>hi", MOST)[:2] == (BOS, BOS)
    assert tokenizer.encode_chat("<bos>hi", MOST)[0] == BOS


@pytest.mark.parametrize("text", ["hi", "<bos>hi", "<bos><bos>hi"])
def test_exactly_one_bos(tmp_path: pathlib.Path, text: str) -> None:
    tokenizer = ModelTokenizer.load(write_tokenizer(tmp_path, with_bos(byte_tokenizer())))
    ids = tokenizer.encode_text(text, MOST)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1
    assert tokenizer.decode(ids) == "hi"
    for encode in (tokenizer.encode_bare, tokenizer.encode_chat):
        assert encode(text, MOST).count(BOS) == text.count("<bos>"), "only what stands there"


@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_overrides_the_tokenizer(tmp_path: pathlib.Path, adds: bool) -> None:
    codec = byte_tokenizer() if adds else with_bos(byte_tokenizer())
    tokenizer = ModelTokenizer.load(write_tokenizer(tmp_path, codec, add_bos_token=adds))
    assert tokenizer.encode_text("hi", MOST).count(BOS) == adds
    assert tokenizer.encode_chat("hi", MOST).count(BOS) == 0, "a template decides itself, as in transformers"


def test_truncation_of_the_file_is_ignored(tmp_path: pathlib.Path) -> None:
    codec = byte_tokenizer()
    codec.enable_truncation(4)
    codec.enable_padding(length=64)
    assert len(ModelTokenizer.load(write_tokenizer(tmp_path, codec)).encode_text("0123456789", MOST)) == 10


def test_template_locations(tmp_path: pathlib.Path) -> None:
    beside = write_tokenizer(tmp_path / "a", byte_tokenizer(), template="beside", chat_template="inside")
    assert ModelTokenizer.load(beside).chat_template == "beside"
    inside = write_tokenizer(tmp_path / "b", byte_tokenizer(), template="", chat_template="inside")
    assert ModelTokenizer.load(inside).chat_template == "inside"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    named = write_tokenizer(tmp_path / "c", byte_tokenizer(), template="", chat_template=several)
    both = "{% if tools %}t{% else %}d{% endif %}"
    assert ModelTokenizer.load(named).chat_template == both
    # Since transformers 4.51 further templates are files.
    more = named / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("file")
    assert ModelTokenizer.load(named).chat_template == both.replace("t{% else", "file{% else")
    of_images = write_tokenizer(tmp_path / "e", byte_tokenizer(), template="")
    (of_images / "chat_template.json").write_text(json.dumps({"chat_template": "images"}))
    assert ModelTokenizer.load(of_images).chat_template == "images"
    (of_images / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    assert ModelTokenizer.load(of_images).chat_template == "own", "as transformers' tokenizer has it"
    none = write_tokenizer(tmp_path / "d", byte_tokenizer(), template="")
    assert ModelTokenizer.load(none).chat_template == ""


def test_a_template_of_the_flag_is_used_in_place_of_the_models(tmp_path: pathlib.Path) -> None:
    model, mine = write_tokenizer(tmp_path / "a", byte_tokenizer(), template="beside"), tmp_path / "mine.jinja"
    mine.write_text("{{ messages }}")
    assert ModelTokenizer.load(model, str(mine)).chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "cannot be read: 'utf-8' codec"),
        (b"line\n{% if x %}", ", line 2: Unexpected end of template"),
        (b"x" * (MAX_TEMPLATE_BYTES + 1), f"larger than {MAX_TEMPLATE_BYTES} bytes"),
    ],
)
def test_an_invalid_template_file_is_refused(tmp_path: pathlib.Path, written: bytes | None, said: str) -> None:
    model, mine = write_tokenizer(tmp_path / "a", byte_tokenizer()), tmp_path / "mine.jinja"
    if written is not None:
        mine.write_bytes(written)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        ModelTokenizer.load(model, str(mine))
    assert str(mine) in refused.value.message


def test_special_tokens_are_read_in_both_spellings(tmp_path: pathlib.Path) -> None:
    tokenizer = ModelTokenizer.load(write_tokenizer(tmp_path, byte_tokenizer(), pad_token=None))
    assert tokenizer.specials == {"bos_token": "<bos>", "eos_token": "<eos>"}


def test_broken_folders_are_a_one_line_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelTokenizer.load(tmp_path)
    folder = write_tokenizer(tmp_path / "x", byte_tokenizer(), template="a" * (module.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        ModelTokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        ModelTokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps([1]))


async def test_a_long_prompt_does_not_block_the_event_loop(tmp_path: pathlib.Path) -> None:
    tokenizer, pool = ModelTokenizer.load(write_tokenizer(tmp_path, byte_tokenizer())), TokenizerPool()
    try:
        for encode in (tokenizer.encode_text, tokenizer.encode_chat):
            turns, work = 0, asyncio.create_task(pool.run(encode, "hello world " * 50_000, MOST))
            while not work.done():
                await loop_turns(1)
                turns += 1
            assert len(await work) == 600_000
            assert turns > 20, "the loop stood still while the prompt was tokenized"
    finally:
        pool.close()


async def test_the_pool_is_bounded_and_counts_jobs_of_cancelled_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED_JOBS", 2)
    pool, gate = TokenizerPool(), threading.Event()
    try:
        running = threading.Semaphore(0)

        def job() -> bool:
            running.release()
            return gate.wait(WITHIN_S)

        first, second = (asyncio.create_task(pool.run(job)) for _ in range(2))
        for _ in range(2):
            await until("a job to run", lambda: running.acquire(blocking=False))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        with pytest.raises(Overloaded, match="wait to be tokenized"):
            await pool.run(str)
        gate.set()
        assert await second is True
        await until("both jobs to be over", lambda: pool.jobs == 0)
        assert await pool.run(str, 5) == "5"
    finally:
        gate.set()
        pool.close()


def test_a_much_too_long_text_is_refused_before_encoding(tmp_path: pathlib.Path) -> None:
    tokenizer = ModelTokenizer.load(write_tokenizer(tmp_path, with_bos(byte_tokenizer())))
    for encode in (tokenizer.encode_text, tokenizer.encode_bare, tokenizer.encode_chat):
        assert len(encode("x" * 100, 10)) >= 100, "a little more is counted exactly, by the caller"
        with pytest.raises(module.TextTooLong, match=r"^2\d\d\d tokens$"):
            encode("x" * 2000, 10)
        with pytest.raises(module.TextTooLong, match=r"^at least \d+ tokens$") as failure:
            encode("你" * 100_000, 10)
        assert 10 < failure.value.tokens < len(encode("你" * 100_000, 10**6))
    assert len(tokenizer.encode_text("<bos>" * 20 + "x" * 9, 10)) == 10
