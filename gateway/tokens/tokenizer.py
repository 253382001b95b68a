"""Tokenizes text with the `tokenizers` library, off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from pillion.errors import ConfigError
from pillion.gateway.admission.tenants import OPEN, Tenant
from pillion.gateway.admission.turns import ThreadJob, ThreadTurns
from pillion.gateway.tokens.answer_text import Detokenizer, Spellings, new_detokenizer
from pillion.gateway.tokens.client_marks import BREAKER, MarkGuard

T = TypeVar("T")

TOKENIZER_THREADS = 2
LOOP_BYTES = 16 * 2**10
TOKEN_BYTES = 4
# More than admission's default limit, so only a raised one reaches it.
MAX_QUEUED_JOBS = 4096
# A template is a page of text; a megabyte of it is a mistake or an attack.
MAX_TEMPLATE_BYTES = 2**20
# Bytes per allowed token above which a text is probably too long, so its beginning is tokenized first.
LIKELY_TOKEN_BYTES = 6
# Tokens above the limit that are counted exactly: the beginning of a text may have some more than the whole.
CUT_TOKENS = 1024
MAX_CHAR_BYTES = 4
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTooLong(Exception):  # noqa: N818
    """A text with more tokens than allowed: ``tokens``, or at least that many."""

    def __init__(self, tokens: int, *, exact: bool) -> None:
        super().__init__(f"{'' if exact else 'at least '}{tokens} tokens")
        self.tokens = tokens
        self.exact = exact


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """One model's tokenizer and chat template.

    Attributes:
        codec: the loaded tokenizer.
        specials: texts of the named special tokens ("bos_token"...), as the chat template sees them.
        chat_template: Jinja source, "" if the model has none.
        bos_id: id of the beginning-of-text token, or None.
        adds_bos: whether a prompt begins with it.
        codec_writes_bos: whether ``codec`` adds it by itself; the configuration may differ.
        spellings: cached texts of its tokens, for all answers.
        guard: tokenizer for special tokens that a client's messages spell as text; None if they are special tokens.
    """

    codec: tokenizers.Tokenizer
    specials: Mapping[str, str]
    chat_template: str
    bos_id: int | None
    adds_bos: bool
    codec_writes_bos: bool
    spellings: Spellings
    guard: MarkGuard | None = None

    @classmethod
    def load(cls, folder: Path, template: str = "", *, guards: bool = True) -> ModelTokenizer:
        """Load tokenizer.json, tokenizer_config.json and the chat template, or the file ``template`` in its place;
        ``guards``: special tokens spelled in messages are text. Raises ConfigError."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json")
        try:
            codec = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
            raise ConfigError(f"{path} cannot be read: {error}") from None
        # Prompts must not be truncated or padded silently.
        codec.no_truncation()
        codec.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        specials = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
        bos_id = codec.token_to_id(specials["bos_token"]) if "bos_token" in specials else None
        writes = bos_id is not None and codec.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
        configured = config.get("add_bos_token")
        adds = configured if isinstance(configured, bool) and bos_id is not None else writes
        guard = MarkGuard.of(codec) if guards else None
        return cls(codec, specials, chat_template_of(folder, template), bos_id, adds, writes, Spellings(codec), guard)

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of special tokens that a client's messages must not become."""
        return () if self.guard is None else tuple(self.guard.marks.values())

    def encode_text(self, text: str, most_tokens: int) -> tuple[int, ...]:
        """Return the ids of a raw prompt, with the configured special tokens, never two BOS.

        This and the two methods below raise TextTooLong for many more than ``most_tokens``, before creating an object
        for each.
        """
        ids = self._encode(text, True, most_tokens)
        return self._one_bos(ids[1:] if self.codec_writes_bos else ids)

    def encode_bare(self, text: str, most_tokens: int) -> tuple[int, ...]:
        """Return the ids of a piece of text, without special tokens except those that it spells."""
        return tuple(self._encode(text, False, most_tokens))

    def encode_chat(self, rendered: str, most_tokens: int) -> tuple[int, ...]:
        """Return the ids of a rendered conversation. The template has written all special tokens, with BOS; those that
        the client spelled are text."""
        guard = self.guard
        if guard is None or not (guard.is_spelt_by_others or BREAKER in rendered):
            return tuple(self._encode(rendered, False, most_tokens))
        return tuple(self._encode(rendered, False, most_tokens, guard))

    def encode_cut(self, text: str, most_tokens: int) -> tuple[int, ...]:
        """Return the ids of a raw prompt, see :meth:`encode_text`, cut to the first ``most_tokens`` with the special
        tokens before and after a text."""
        check_wanted()
        encoding = self._encoding(self._likely(text, most_tokens), False)
        specials = self.codec.num_special_tokens_to_add(False)
        bos = int(self.adds_bos and not self.codec_writes_bos) - int(self.codec_writes_bos and not self.adds_bos)
        encoding.truncate(max(most_tokens - specials - bos, 0))
        ids: list[int] = self.codec.post_process(encoding).ids
        return self._one_bos(ids[1:] if self.codec_writes_bos else ids)[:most_tokens]

    def encode_pair(self, first: str, second: str, most_tokens: int | None) -> tuple[tuple[int, ...], int]:
        """Return the ids of a pair of texts as the tokenizer joins them, and where the second one begins if the model
        marks that, else 0. The second text is cut so that there are ``most_tokens``; None: uncut."""
        check_wanted()
        one, other = self.codec.encode_batch([first, second], add_special_tokens=False)
        if most_tokens is not None:
            other.truncate(max(most_tokens - self.codec.num_special_tokens_to_add(True) - len(one), 0))
        encoding = self.codec.post_process(one, other)
        kinds: list[int] = encoding.type_ids
        return tuple(encoding.ids), kinds.index(1) if 1 in kinds else 0

    def truncate(self, text: str, most_tokens: int) -> str:
        """Return the longest prefix of a text with at most ``most_tokens`` tokens."""
        check_wanted()
        offsets = self.codec.encode_batch([self._likely(text, most_tokens)], add_special_tokens=False)[0].offsets
        return (
            text if len(offsets) <= most_tokens else text[: min(offsets[most_tokens][0], offsets[most_tokens - 1][1])]
        )

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return an answer's whole text without special tokens."""
        # decode_batch releases the GIL, which decode holds.
        return str(self.codec.decode_batch([list(token_ids)], skip_special_tokens=True)[0])

    def detokenizer(self, *, shows_specials: bool = False) -> Detokenizer:
        """Create an incremental decoder for one answer, whose text may show special tokens."""
        return new_detokenizer(self.spellings.showing_specials() if shows_specials else self.spellings)

    def bad_sequences(self, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word, at the beginning of a text and after a space, without duplicates or sequences
        with a token outside ``vocab_size``."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            check_wanted()
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                ids: list[int] = self._encoding(text, False).ids
                if ids and max(ids) < vocab_size:
                    found[tuple(ids)] = None
        return tuple(found)

    def cut_ids(self, token_ids: tuple[int, ...], most_tokens: int, side: str) -> tuple[int, ...]:
        """Return at most ``most_tokens`` ids of a prompt: the first ones if ``side`` is "right", else the last ones,
        after its beginning-of-text token."""
        if len(token_ids) <= most_tokens or side == "right":
            return token_ids[:most_tokens]
        keeps_bos = token_ids[0] == self.bos_id and most_tokens > 1
        first = token_ids[:1] if keeps_bos else ()
        return (*first, *token_ids[len(token_ids) - most_tokens + len(first) :])

    def _encode(self, text: str, specials: bool, most_tokens: int, guard: MarkGuard | None = None) -> list[int]:
        # Every token is an object that is freed under the GIL, and freeing a million of them stalls all streams.
        if len(text) > LIKELY_TOKEN_BYTES * most_tokens // MAX_CHAR_BYTES:
            raw, likely = text.encode(), LIKELY_TOKEN_BYTES * (most_tokens + CUT_TOKENS)
            if len(raw) > likely:
                beginning = self._encoding(raw[:likely].decode(errors="ignore"), specials, guard)
                if len(beginning) > most_tokens + CUT_TOKENS:
                    raise TextTooLong(len(beginning) - CUT_TOKENS, exact=False)
        check_wanted()
        encoding = self._encoding(text, specials, guard)
        # Some more are tolerated, because each BOS in the text itself is removed later.
        if len(encoding) > most_tokens + CUT_TOKENS:
            raise TextTooLong(len(encoding), exact=True)
        ids: list[int] = encoding.ids if guard is None else guard.ids(encoding, text)
        return ids

    def _likely(self, text: str, most_tokens: int) -> str:
        """Return a text, or a prefix of it that surely has more than ``most_tokens``."""
        raw, likely = text.encode(), LIKELY_TOKEN_BYTES * (most_tokens + CUT_TOKENS)
        if len(raw) <= likely:
            return text
        beginning = raw[:likely].decode(errors="ignore")
        # Tokens at the cut may differ from those of the whole.
        return beginning if len(self._encoding(beginning, False)) > most_tokens + CUT_TOKENS else text

    def _encoding(self, text: str, specials: bool, guard: MarkGuard | None = None) -> tokenizers.Encoding:
        # A batch of one, since encode holds the GIL: a long prompt would stall all streams for seconds.
        if guard is None:
            return self.codec.encode_batch_fast([text], add_special_tokens=specials)[0]
        # Only encode_batch, which is slower, has the tokens' offsets.
        return guard.codec.encode_batch([text], add_special_tokens=specials)[0]

    def _one_bos(self, ids: list[int]) -> tuple[int, ...]:
        if not self.adds_bos or self.bos_id is None:
            return tuple(ids)
        start = 0
        while start < len(ids) and ids[start] == self.bos_id:
            start += 1
        return (self.bos_id, *ids[start:])


class JobAbandoned(Exception):  # noqa: N818
    """No caller waits any more for this thread's job."""


_here = threading.local()


def check_wanted() -> None:
    """Raise JobAbandoned if no caller waits any more for this thread's job. To be called for each item of a client's
    list."""
    job: ThreadJob | None = getattr(_here, "job", None)
    if job is not None and job.abandoned:
        raise JobAbandoned


class TokenizerPool:
    """Thread pool for tokenization and other work too long for the event loop, with a bounded queue that is fair
    between tenants."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer")
        self._turns = ThreadTurns(TOKENIZER_THREADS, MAX_QUEUED_JOBS)
        self._begun: dict[ThreadJob, asyncio.Future[None]] = {}

    @property
    def jobs(self) -> int:
        """Jobs that wait or run."""
        return self._turns.jobs

    async def run(self, job: Callable[..., T], *arguments: Any, tenant: Tenant = OPEN, size_bytes: int = 0) -> T:
        """Run ``job(*arguments)``, which processes about ``size_bytes``, on a thread, in the tenant's turn.

        A cancelled caller stops waiting. Its job is dropped, or ends at its next check_wanted; until then it occupies
        its thread, and counts. Raises Overloaded if the queue is full, and the job's exceptions.
        """
        loop = asyncio.get_running_loop()
        turn = self._turns.wait(tenant, size_bytes)
        begun = self._begun[turn] = loop.create_future()
        self._grant()
        try:
            await begun
            work = self._threads.submit(_run, turn, job, arguments)
        except BaseException:
            self._end(turn)
            raise

        def ended(_: Future[T]) -> None:
            # The loop may be closed if the gateway has ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._end, turn)

        work.add_done_callback(ended)
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            turn.abandoned = True
            raise

    def retain(self, names: Collection[str]) -> None:
        """Drop tenants that are neither in ``names`` nor waiting."""
        self._turns.retain(names)

    def close(self) -> None:
        """Drop waiting jobs; running ones end by themselves, as the prompt's size bounds them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, turn: ThreadJob) -> None:
        del self._begun[turn]
        self._turns.end(turn)
        self._grant()

    def _grant(self) -> None:
        for turn in self._turns.grant():
            begun = self._begun[turn]
            if not begun.done():
                # The turn of a cancelled caller is released by itself.
                begun.set_result(None)


def _run(turn: ThreadJob, job: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """Run a job on a thread of the pool."""
    _here.job = turn
    try:
        check_wanted()
        return job(*arguments)
    finally:
        _here.job = None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return parsed if isinstance(parsed, dict) else {}


def _token_text(entry: Any) -> str | None:
    """Return the text of a special token, configured as a string or an object."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def chat_template_of(folder: Path, template: str = "") -> str:
    """Return a model's chat template, "" if it has none, or the file ``template`` if given. Of named templates,
    "tool_use" is for conversations with tools and "default" for others. Raises ConfigError."""
    if template:
        return read_template(template)
    configured = _read_json(folder / "tokenizer_config.json").get("chat_template")
    if configured is None:
        configured = _read_json(folder / "chat_template.json").get("chat_template")
    named: dict[Any, Any] = {"default": configured}
    if isinstance(configured, list):
        named = {one.get("name"): one.get("template") for one in configured if isinstance(one, dict)}
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (folder / file).is_file():
            named[name] = (folder / file).read_text(encoding="utf-8")
    plain, with_tools = (text if isinstance(text, str) else "" for text in map(named.get, ("default", "tool_use")))
    source = f"{{% if tools %}}{with_tools}{{% else %}}{plain}{{% endif %}}" if with_tools else plain
    return _bounded(source, str(folder))


def read_template(path: str) -> str:
    """Read a chat template's file. Raises ConfigError if it cannot be read or parsed."""
    import jinja2

    from pillion.gateway.tokens.template_worker import environment

    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            source = _bounded(file.read(MAX_TEMPLATE_BYTES + 1), path)
        # Only parsed here; it runs in a separate process.
        environment().parse(source)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise ConfigError(f"--chat-template {path} cannot be read: {why}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template {path}, line {error.lineno}: {error.message}") from None
    return source


def _bounded(source: str, where: str) -> str:
    if len(source.encode()) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"the chat template of {where} is larger than {MAX_TEMPLATE_BYTES} bytes")
    return source
