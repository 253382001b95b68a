"""Table of reasoning formats: the marks around a model's reasoning. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.harmony import ANALYSIS, CHANNEL, HARMONY_MARKS, MESSAGE


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks of one format.

    Attributes:
        begin, end: marks around the reasoning.
        assumed: whether an answer begins within reasoning unless its prompt ends it; some models omit ``begin``.
        answer: marks around the content that follows; "" for none.
        last: optional mark at the end of the answer; "" for none.
        others: another spelling of ``begin`` and ``end``.
        found: texts that all occur in a chat template of this format; () for ``end``.
        parts: special tokens that begin marks.
        channels: marks of a format whose answers are messages in channels; ``begin`` and ``end`` are then heads of such
            messages. () for all others.
    """

    begin: str
    end: str
    assumed: bool = False
    answer: tuple[str, str] = ("", "")
    last: str = ""
    others: tuple[str, str] = ("", "")
    found: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()

    @property
    def in_channels(self) -> bool:
        """True if answers are messages in channels."""
        return bool(self.channels)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format."""
        marks = (self.begin, self.end, *self.others, *self.answer, self.last, *self.parts)
        return self.channels or tuple(filter(None, marks))

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has the format's marks. Templates of models that do not reason often do, so a
        format that takes every answer for reasoning matches none."""
        return not self.assumed and all(text in template for text in self.found or (self.end,))

    def answers(self, prompt: str) -> bool:
        """Return whether an answer to ``prompt`` begins within its content."""
        return bool(self.answer[0]) and prompt.rstrip().endswith(self.answer[0])

    def opened_by(self, prompt: str) -> bool | None:
        """Return whether an answer to ``prompt`` begins within reasoning; None if the answer itself shows it.

        Templates end a prompt with ``begin`` to enable reasoning, and with both marks to disable it.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return True
        if tail.endswith(self.end) or self.answers(prompt):
            return False
        return True if self.assumed else None


HARMONY = "openai_gptoss"
_THINK = ReasoningFormat("<think>", "</think>")
# By vLLM's names. `auto` takes the first format whose marks are in the chat template.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        last="<|close|>message<|sep|>",
        parts=("<|open|>", "<|close|>", "<|sep|>"),
        found=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "hunyuan_a13b": replace(_THINK, answer=("<answer>", "</answer>"), found=("</think>", "</answer>")),
    "ernie45": replace(_THINK, answer=("<response>", "</response>"), found=("</think>", "</response>")),
    "qwen3": _THINK,
    **dict.fromkeys(("deepseek_v3", "hy_v3"), _THINK),
    # Models that reason unless their prompt disables it, and omit the first mark.
    **dict.fromkeys(
        ("deepseek_r1", "glm45", "glm47", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3", "step3"),
        replace(_THINK, assumed=True),
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", parts=("<|channel>",)),
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>", "<|END_THINKING|>", answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        others=("Here's my thought process:", "Here's my response:"),
    ),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    HARMONY: ReasoningFormat(f"{CHANNEL}{ANALYSIS}{MESSAGE}", f"{CHANNEL}final{MESSAGE}", channels=HARMONY_MARKS),
}

REASONING_ALIASES = {
    "deepseek-r1": "deepseek_r1",
    "deepseek-v3": "deepseek_v3",
    "gpt-oss": HARMONY,
    "hunyuan": "hunyuan_a13b",
    "interns1": "qwen3",
    "minimax": "qwen3",
    "minimax-m3": "minimax_m3",
    "nemotron_3": "nemotron_v3",
    "qwen3-thinking": "deepseek_r1",
}


def read_reasoning(
    form: ReasoningFormat, opened: bool | None, text: PendingText, parts: AnswerParts, calls: bool = False
) -> Generator[None, None, None]:
    """Parse the answer up to the end of its reasoning, if it begins with it. With ``calls``, the parser of calls goes
    on within the reasoning, which a call ends too."""
    if opened is False:
        return
    text.begin_trial()
    yield from text.past_space()
    if (yield from text.has(form.begin)) or (form.others[0] and (yield from text.has(form.others[0]))):
        text.commit()
    else:
        parts.content(text.roll_back())
        if not opened:
            return
    parts.mark()
    parts.thought = True
    ends = Marks(*filter(None, (form.end, form.others[1])))
    if calls:
        parts.inner = True
        text.aside(ends, parts.content, parts.reasoned)
    elif (yield from text.until(ends, parts.think)):
        parts.mark()
