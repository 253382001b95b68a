"""Table of reasoning formats: the marks around a model's reasoning. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from pillion.gateway.formats.answer_parts import AnswerParts, Marks, PendingText
from pillion.gateway.formats.harmony import ANALYSIS, HARMONY_MARKS, HarmonyMark


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Marks of one format.

    Attributes:
        begin, end: marks around the reasoning.
        assumed: whether an answer begins within reasoning unless its prompt ends it; some models omit ``begin``.
        answer: marks around the content after the reasoning; "" for none.
        last: optional mark at the end of the answer; "" for none.
        alternates: another spelling of ``begin`` and ``end``.
        template_texts: texts that all occur in a chat template of this format; () for ``end``.
        parts: special tokens that are parts of the marks above.
        channels: marks of a format whose answers are messages in channels; ``begin`` and ``end`` are then headers of
            messages. () for all other formats.
    """

    begin: str
    end: str
    assumed: bool = False
    answer: tuple[str, str] = ("", "")
    last: str = ""
    alternates: tuple[str, str] = ("", "")
    template_texts: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()

    @property
    def in_channels(self) -> bool:
        """True if answers are messages in channels."""
        return bool(self.channels)

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format."""
        marks = (self.begin, self.end, *self.alternates, *self.answer, self.last, *self.parts)
        return self.channels or tuple(filter(None, marks))

    def is_in(self, template: str) -> bool:
        """Return whether a chat template has the format's marks. Never True with ``assumed``: templates of models that
        do not reason often have the marks, and all their answers would be taken for reasoning."""
        return not self.assumed and all(text in template for text in self.template_texts or (self.end,))

    def begins_in_content(self, prompt: str) -> bool:
        """Return whether an answer to ``prompt`` begins within its content."""
        return bool(self.answer[0]) and prompt.rstrip().endswith(self.answer[0])

    def begins_in_reasoning(self, prompt: str) -> bool | None:
        """Return whether an answer to ``prompt`` begins within reasoning; None if the answer itself shows it.

        Templates end a prompt with ``begin`` to enable reasoning, and with both marks to disable it.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return True
        if tail.endswith(self.end) or self.begins_in_content(prompt):
            return False
        return True if self.assumed else None


HARMONY = "openai_gptoss"
_THINK = ReasoningFormat("<think>", "</think>")
# Keys are vLLM's names. `auto` selects the first format whose marks are in the chat template.
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        last="<|close|>message<|sep|>",
        parts=("<|open|>", "<|close|>", "<|sep|>"),
        template_texts=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "hunyuan_a13b": replace(_THINK, answer=("<answer>", "</answer>"), template_texts=("</think>", "</answer>")),
    "ernie45": replace(_THINK, answer=("<response>", "</response>"), template_texts=("</think>", "</response>")),
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
        alternates=("Here's my thought process:", "Here's my response:"),
    ),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    HARMONY: ReasoningFormat(
        f"{HarmonyMark.CHANNEL}{ANALYSIS}{HarmonyMark.MESSAGE}",
        f"{HarmonyMark.CHANNEL}final{HarmonyMark.MESSAGE}",
        channels=HARMONY_MARKS,
    ),
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
    """Parse the reasoning at the beginning of an answer, if there is any. With ``calls``, only its first mark is parsed
    here: the parser of calls continues, since a call ends the reasoning too."""
    if opened is False:
        return
    text.begin_trial()
    yield from text.skip_space()
    if (yield from text.accept(form.begin)) or (form.alternates[0] and (yield from text.accept(form.alternates[0]))):
        text.commit()
    else:
        parts.content(text.roll_back())
        if not opened:
            return
    parts.mark()
    parts.has_reasoning = True
    ends = Marks(*filter(None, (form.end, form.alternates[1])))
    if calls:
        parts.in_reasoning = True
        text.watch(ends, parts.content, parts.end_reasoning)
    elif (yield from text.until(ends, parts.think)):
        parts.mark()
