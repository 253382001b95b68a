"""Sessions from a config: arrival times and prompts, deterministic in the seed. Sans-IO.

random   one request per session: token ids; all prompts differ
trace    one request per session: a row of a recorded trace
chats    several turns per session: one of a few shared system prompts (Zipf), then the user's messages; each turn sends
         the whole history, with the server's actual answers

Sessions arrive by a renewal process with gamma distributed gaps, as in `vllm bench serve`:

burstiness    inf   every gap is the same (constant)
              1     exponential gaps (Poisson)
              < 1   bursts and silences: the gaps' coefficient of variation is 1 / sqrt(burstiness)
"""

from __future__ import annotations

import itertools
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pillion.errors import ConfigError
from pillion.loadgen.traces import PromptMaker, read_trace

PROCESSES = ("poisson", "constant", "gamma")
MIN_BURSTINESS = 1e-3
MAX_TOKENS = 1 << 20
WORKLOADS = ("random", "chats", "trace")
MAX_REQUESTS = 1_000_000
MAX_PREPARED_TOKENS = 200_000_000
# Words that are single tokens in common vocabularies. The server's count of tokens is authoritative.
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
    *("story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Load of one run; see `pillion bench run --help`.

    Attributes:
        rate: sessions per second; None for a closed loop, or for a trace's own times.
        concurrency: sessions at any time in a closed loop.
        requests: max requests.
        duration_s: time after which no request arrives.
        token_range: first token id of random prompts, and end of the range.
        max_model_len: skip rows of a trace that need more tokens.
    """

    workload: str = "random"
    arrivals: str = "poisson"
    burstiness: float = 1.0
    rate: float | None = None
    concurrency: int | None = None
    requests: int = 100
    duration_s: float | None = None
    input_len: str = "256"
    output_len: str = "64"
    system_prompts: int = 4
    system_len: str = "256"
    turns: str = "uniform:2,5"
    think_s: float = 1.0
    trace: str = ""
    max_model_len: int | None = None
    token_range: tuple[int, int] = (1000, 30_000)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: token ids, or the user's next message after a pause of ``think_s``."""

    output_tokens: int
    ids: Sequence[int] = ()
    text: str = ""
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadSession:
    """One user's requests, in order. ``at_s`` is the session's begin, ``system`` its first message."""

    at_s: float
    turns: tuple[Turn, ...]
    system: str = ""


def make_sessions(config: LoadConfig) -> list[LoadSession]:
    """Return all sessions of the config, in order of arrival. Raises ConfigError for an impossible config."""
    try:
        return _make(config)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def text_of(ids: Sequence[int]) -> str:
    """Return a text with one word per token id: prompts with a common prefix of ids have a common prefix of text."""
    return " ".join(WORDS[token % len(WORDS)] for token in ids)


def _make(config: LoadConfig) -> list[LoadSession]:
    if config.workload not in WORKLOADS:
        raise ValueError(f"workload {config.workload!r} is not one of {', '.join(WORKLOADS)}")
    if not 1 <= config.requests <= MAX_REQUESTS:
        raise ValueError(f"{config.requests} requests are not within 1 and {MAX_REQUESTS}")
    if config.concurrency is not None and (config.rate is not None or config.concurrency < 1):
        raise ValueError("a closed loop has a concurrency of at least 1 and no rate: --max-concurrency caps a rate")
    if config.workload == "trace":
        return _from_trace(config)
    if config.rate is None and config.concurrency is None:
        raise ValueError("give --rate for an open loop or --concurrency for a closed one")
    sessions = list(_chats(config) if config.workload == "chats" else _random(config))
    if config.rate is None:
        return sessions
    burstiness = burstiness_of(config.arrivals, config.burstiness)
    times = arrival_times(config.rate, burstiness, config.seed, len(sessions), config.duration_s)
    return [replace(session, at_s=at_s) for session, at_s in zip(sessions, times, strict=False)]


def _vocabulary(config: LoadConfig) -> list[int]:
    low, high = config.token_range
    if not 0 <= low < high <= 1 << 31:
        raise ValueError(f"token ids {low},{high} are not a range")
    return list(range(low, high))


def _random(config: LoadConfig) -> Iterator[LoadSession]:
    inputs, outputs = parse_lengths(config.input_len), parse_lengths(config.output_len)
    lengths = random.Random(f"lengths {config.seed}")
    vocabulary = _vocabulary(config)
    drawn = [(inputs.draw(lengths), outputs.draw(lengths)) for _ in range(config.requests)]
    _check_room(sum(asked for asked, _ in drawn))
    for number, (asked, answered) in enumerate(drawn):
        draw = random.Random(f"prompt {config.seed} {number}")
        yield LoadSession(0.0, (Turn(answered, array("I", draw.choices(vocabulary, k=asked))),))


def _check_room(tokens: int) -> None:
    if tokens > MAX_PREPARED_TOKENS:
        raise ValueError(f"the prompts have more than {MAX_PREPARED_TOKENS} tokens together: fewer --requests")


def _chats(config: LoadConfig) -> Iterator[LoadSession]:
    asks, answers = parse_lengths(config.input_len), parse_lengths(config.output_len)
    turns, systems = parse_lengths(config.turns), parse_lengths(config.system_len)
    if config.system_prompts < 1 or config.think_s < 0:
        raise ValueError("--system-prompts is at least 1 and --think-s not negative")
    draw = random.Random(f"chats {config.seed}")
    prompts = [" ".join(draw.choices(WORDS, k=systems.draw(draw))) for _ in range(config.system_prompts)]
    weights = [1 / rank for rank in range(1, len(prompts) + 1)]
    left, words = config.requests, 0
    while left > 0:
        made = []
        for turn in range(min(left, turns.draw(draw))):
            asked = asks.draw(draw)
            words += asked
            _check_room(words)
            pause = draw.expovariate(1 / config.think_s) if turn and config.think_s else 0.0
            made.append(Turn(answers.draw(draw), text=" ".join(draw.choices(WORDS, k=asked)), think_s=pause))
        left -= len(made)
        yield LoadSession(0.0, tuple(made), draw.choices(prompts, weights)[0])


def _from_trace(config: LoadConfig) -> list[LoadSession]:
    if not config.trace:
        raise ValueError("the workload trace needs --trace FILE")
    max_tokens = math.inf if config.max_model_len is None else config.max_model_len
    rows = [row for row in read_trace(Path(config.trace)) if row.input_length + row.output_length <= max_tokens]
    rows = rows[: config.requests]
    if not rows:
        raise ValueError(f"{config.trace} has no request that fits")
    times = [(row.timestamp - rows[0].timestamp) / 1000 for row in rows]
    if config.rate is not None and times[-1]:
        factor = (len(rows) - 1) / times[-1] / config.rate
        times = [at_s * factor for at_s in times]
    maker, sessions, tokens = PromptMaker(config.seed, _vocabulary(config)), [], 0
    for number, (at_s, row) in enumerate(zip(times, rows, strict=True)):
        if config.duration_s is not None and at_s > config.duration_s:
            break
        tokens += row.input_length
        _check_room(tokens)
        at_s = 0.0 if config.concurrency else at_s
        sessions.append(LoadSession(at_s, (Turn(row.output_length, maker.prompt_of(number, row)),)))
    return sessions


def burstiness_of(process: str, burstiness: float) -> float:
    """Return the burstiness of an arrival process: that of the gamma process if it is given. Raises ValueError for an
    unknown process or an invalid burstiness."""
    if process not in PROCESSES:
        raise ValueError(f"arrivals {process!r} are not one of {', '.join(PROCESSES)}")
    if process == "gamma" and not MIN_BURSTINESS <= burstiness < math.inf:
        raise ValueError(f"burstiness {burstiness:g} is not at least {MIN_BURSTINESS:g}")
    return {"constant": math.inf, "poisson": 1.0}.get(process, burstiness)


def arrival_times(rate: float, burstiness: float, seed: int, count: int, until_s: float | None = None) -> list[float]:
    """Return the arrival times of up to ``count`` sessions, in seconds from the begin, at ``rate`` per second.

    Without ``until_s`` the gaps are scaled so that the last arrival is at ``count / rate``: few random arrivals would
    otherwise miss the requested rate. Raises ValueError for a rate that is not positive.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate:g} requests per second is not above 0")
    draw = random.Random(f"arrivals {seed}")
    times = [number / rate for number in range(1, count + 1)]
    if burstiness != math.inf:
        gaps = (draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count))
        times = list(itertools.accumulate(gaps))
    if until_s is not None:
        return [at_s for at_s in times if at_s <= until_s]
    # Gaps of very bursty arrivals may all round to zero.
    factor = count / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [at_s * factor for at_s in times]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution over whole numbers in [low, high].

    Uniform if ``sigma`` is None, otherwise log-normal with ``median`` and standard deviation ``sigma`` of the
    logarithm, clamped to the range.
    """

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    def draw(self, random_: random.Random) -> int:
        """Return a random length in tokens."""
        if self.sigma is None:
            return random_.randint(self.low, self.high)
        drawn = random_.lognormvariate(math.log(self.median), self.sigma)
        return min(self.high, max(self.low, round(min(drawn, self.high))))


def parse_lengths(text: str) -> Lengths:
    """Parse ``N``, ``uniform:LOW,HIGH`` or ``lognormal:MEDIAN,SIGMA[,MAX]``. Raises ValueError for other text."""
    kind, colon, rest = text.strip().partition(":")
    try:
        numbers = [float(number) for number in (rest if colon else kind).split(",")]
    except ValueError:
        numbers = []
    shape: tuple[float, ...] = ()
    match ("fixed" if not colon else kind, numbers):
        case ("fixed", [low]):
            high = low
        case ("uniform", [low, high]):
            pass
        case ("lognormal", [median, sigma, *most]) if len(most) <= 1 and median >= 1 and 0 <= sigma <= 10:
            low, high, shape = 1.0, most[0] if most else float(MAX_TOKENS), (median, sigma)
        case _:
            raise ValueError(f"length {text!r} is not N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]")
    for bound in (low, high):
        if not bound.is_integer():
            raise ValueError(f"length {text!r}: {bound:g} is not a whole number of tokens")
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"length {text!r} is not within 1 and {MAX_TOKENS}, the smaller first")
    return Lengths(int(low), int(high), *shape)
