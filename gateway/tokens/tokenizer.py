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
# Max bytes of a job on the event loop; larger ones run on a thread.
LOOP_BYTES = 16 * 2**10
# Bytes of a token id, for the size of jobs on token ids.
TOKEN_BYTES = 4
# Above admission's default limit, so that only a raised limit makes it effective.
MAX_QUEUED_JOBS = 4096
# Templates have a few kilobytes; a megabyte is a mistake or an attack.
MAX_TEMPLATE_BYTES = 2**20
# Bytes per allowed token above which a text is probably too long: its beginning is then tokenized first.
LIKELY_TOKEN_BYTES = 6
# Tokens above the limit that are counted exactly: the beginning of a text may have some more than the whole.
CUT_TOKENS = 1024
MAX_CHAR_BYTES = 4
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TextTooLong(Exception):  # noqa: N818
    """A text has more tokens than allowed: ``tokens``, or at least that many unless ``exact``."""

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
        adds_bos: whether prompts begin with it.
        codec_writes_bos: whether ``codec`` adds it by itself, whatever tokenizer_config.json says.
        spellings: cached texts of its tokens, for all answers.
        guard: tokenizer by which special tokens spelled in a client's messages stay text; None if they become special
            tokens.
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
        """Load a model's tokenizer.json, tokenizer_config.json and chat template. Raises ConfigError.

        ``template``: a file to use as chat template instead. ``guards``: special tokens spelled in messages stay text.
        """
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

    def encode_text(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """Return the ids of a raw prompt, with the configured special tokens, never two BOS.

        Like :meth:`encode_bare` and :meth:`encode_chat`, raises TextTooLong above ``max_tokens`` + CUT_TOKENS tokens,
        before creating an object for each.
        """
        ids = self._encode(text, True, max_tokens)
        return self._one_bos(ids[1:] if self.codec_writes_bos else ids)

    def encode_bare(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """Return the ids of a text, without special tokens except those that it spells."""
        return tuple(self._encode(text, False, max_tokens))

    def encode_chat(self, rendered: str, max_tokens: int) -> tuple[int, ...]:
        """Return the ids of a rendered conversation. The template has written all special tokens, with BOS; those that
        the client spelled are text."""
        guard = self.guard
        if guard is None or not (guard.is_spelt_by_others or BREAKER in rendered):
            return tuple(self._encode(rendered, False, max_tokens))
        return tuple(self._encode(rendered, False, max_tokens, guard))

    def encode_cut(self, text: str, max_tokens: int) -> tuple[int, ...]:
        """Return the ids of a raw prompt as :meth:`encode_text` does, but truncate the text so that there are at most
        ``max_tokens``, special tokens included."""
        check_wanted()
        encoding = self._encoding(self._likely(text, max_tokens), False)
        specials = self.codec.num_special_tokens_to_add(False)
        bos = int(self.adds_bos and not self.codec_writes_bos) - int(self.codec_writes_bos and not self.adds_bos)
        encoding.truncate(max(max_tokens - specials - bos, 0))
        ids: list[int] = self.codec.post_process(encoding).ids
        return self._one_bos(ids[1:] if self.codec_writes_bos else ids)[:max_tokens]

    def encode_pair(self, first: str, second: str, max_tokens: int | None) -> tuple[tuple[int, ...], int]:
        """Return the ids of a pair of texts as the tokenizer joins them, and the index from which on type ids are 1, or
        0. The second text is truncated so that there are at most ``max_tokens``; None: not truncated."""
        check_wanted()
        one, other = self.codec.encode_batch([first, second], add_special_tokens=False)
        if max_tokens is not None:
            other.truncate(max(max_tokens - self.codec.num_special_tokens_to_add(True) - len(one), 0))
        encoding = self.codec.post_process(one, other)
        kinds: list[int] = encoding.type_ids
        return tuple(encoding.ids), kinds.index(1) if 1 in kinds else 0

    def truncate(self, text: str, max_tokens: int) -> str:
        """Return the longest prefix of a text with at most ``max_tokens`` tokens."""
        check_wanted()
        offsets = self.codec.encode_batch([self._likely(text, max_tokens)], add_special_tokens=False)[0].offsets
        return text if len(offsets) <= max_tokens else text[: min(offsets[max_tokens][0], offsets[max_tokens - 1][1])]

    def decode(self, token_ids: tuple[int, ...]) -> str:
        """Return an answer's whole text without special tokens."""
        # decode_batch releases the GIL, which decode holds.
        return str(self.codec.decode_batch([list(token_ids)], skip_special_tokens=True)[0])

    def detokenizer(self, *, shows_specials: bool = False) -> Detokenizer:
        """Create an incremental decoder for one answer, whose text may show special tokens."""
        return new_detokenizer(self.spellings.showing_specials() if shows_specials else self.spellings)

    def bad_sequences(self, words: Sequence[str], vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of each word at the beginning of a text and after a space, without duplicates and
        sequences with ids from ``vocab_size`` on."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            check_wanted()
            bare = word.lstrip() or word
            for text in (bare, f" {bare}"):
                ids: list[int] = self._encoding(text, False).ids
                if ids and max(ids) < vocab_size:
                    sequences[tuple(ids)] = None
        return tuple(sequences)

    def cut_ids(self, token_ids: tuple[int, ...], max_tokens: int, side: str) -> tuple[int, ...]:
        """Truncate a prompt to ``max_tokens`` ids: on the right if ``side`` is "right", else on the left, after its
        beginning-of-text token."""
        if len(token_ids) <= max_tokens or side == "right":
            return token_ids[:max_tokens]
        keeps_bos = token_ids[0] == self.bos_id and max_tokens > 1
        first = token_ids[:1] if keeps_bos else ()
        return (*first, *token_ids[len(token_ids) - max_tokens + len(first) :])

    def _encode(self, text: str, specials: bool, max_tokens: int, guard: MarkGuard | None = None) -> list[int]:
        # Every token is an object that is freed under the GIL: freeing a million of them stalls all streams.
        if len(text) > LIKELY_TOKEN_BYTES * max_tokens // MAX_CHAR_BYTES:
            raw, likely = text.encode(), LIKELY_TOKEN_BYTES * (max_tokens + CUT_TOKENS)
            if len(raw) > likely:
                beginning = self._encoding(raw[:likely].decode(errors="ignore"), specials, guard)
                if len(beginning) > max_tokens + CUT_TOKENS:
                    raise TextTooLong(len(beginning) - CUT_TOKENS, exact=False)
        check_wanted()
        encoding = self._encoding(text, specials, guard)
        # Slightly more are tolerated, because BOS tokens that the text spells are removed later.
        if len(encoding) > max_tokens + CUT_TOKENS:
            raise TextTooLong(len(encoding), exact=True)
        ids: list[int] = encoding.ids if guard is None else guard.ids(encoding, text)
        return ids

    def _likely(self, text: str, max_tokens: int) -> str:
        """Return a text, or if that is much longer, a prefix of it with more than ``max_tokens``."""
        raw, likely = text.encode(), LIKELY_TOKEN_BYTES * (max_tokens + CUT_TOKENS)
        if len(raw) <= likely:
            return text
        beginning = raw[:likely].decode(errors="ignore")
        # Tokens at the cut may differ from those of the whole.
        return beginning if len(self._encoding(beginning, False)) > max_tokens + CUT_TOKENS else text

    def _encoding(self, text: str, specials: bool, guard: MarkGuard | None = None) -> tokenizers.Encoding:
        # A batch of one, since encode holds the GIL: a long prompt would stall all streams for seconds.
        if guard is None:
            return self.codec.encode_batch_fast([text], add_special_tokens=specials)[0]
        # Only encode_batch, which is slower, has the tokens' offsets.
        return guard.codec.encode_batch([text], add_special_tokens=specials)[0]

    def _one_bos(self, ids: list[int]) -> tuple[int, ...]:
        """Return ids with exactly one BOS at the beginning if prompts begin with it, else unchanged."""
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
    """Raise JobAbandoned if no caller waits any more for this thread's job. Long loops call it once per item."""
    job: ThreadJob | None = getattr(_here, "job", None)
    if job is not None and job.abandoned:
        raise JobAbandoned


class TokenizerPool:
    """Thread pool for tokenization and other work that is too long for the event loop, with a bounded queue that is
    fair between tenants."""

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

        If the caller is cancelled, its job is dropped, or ends at its next :func:`check_wanted`; until then it occupies
        its thread. Raises Overloaded if the queue is full, and the job's exceptions.
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
            # RuntimeError: the gateway has ended, and its loop is closed.
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
        """Drop waiting jobs; running ones finish, which takes a bounded time."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _end(self, turn: ThreadJob) -> None:
        del self._begun[turn]
        self._turns.end(turn)
        self._grant()

    def _grant(self) -> None:
        for turn in self._turns.grant():
            begun = self._begun[turn]
            if not begun.done():
                # A cancelled caller releases its turn itself.
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
    """Return a model's chat template, "" if it has none, or the text of the file ``template`` if given. Of several
    named templates, conversations with tools use "tool_use", others "default". Raises ConfigError."""
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
