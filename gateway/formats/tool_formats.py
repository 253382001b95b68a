"""Table of tool formats: how a chat template shows each one, and its parser. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from pillion.gateway.formats.answer_parts import AnswerParts, CallReader, PendingText
from pillion.gateway.formats.harmony import HARMONY_MARKS, NAME_PREFIX, HarmonyAnswer, HarmonyMark
from pillion.gateway.formats.json_calls import (
    ApertusCalls,
    CohereCalls,
    JsonCalls,
    ListCalls,
    LlamaCalls,
    MistralCalls,
    XlamCalls,
)
from pillion.gateway.formats.literal_calls import LITERAL_FORMS, LiteralCalls
from pillion.gateway.formats.named_calls import DEEPSEEK_SEPARATOR, FENCE, NAMED_FORMS, NamedCalls
from pillion.gateway.formats.xml_calls import END_TOOL_CALL, MINIMAX, TOOL_CALL, XML_FORMS, XmlCalls

ToolSchemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        begin, end: marks around a call; ``end`` may be "".
        reader: creates the parser of an answer's text.
        template_texts: groups of texts; a chat template with all texts of one group has this format.
        marks: texts of special tokens that ``reader`` needs.
        inner: further marks, within a call.
        short_ids: whether the template accepts only ids of nine letters and digits.
        bare: whether a call may come without any mark; calls within reasoning are then not recognized.
    """

    begin: str
    end: str
    reader: Callable[[PendingText, AnswerParts, ToolSchemas], CallReader | HarmonyAnswer]
    template_texts: tuple[tuple[str, ...], ...] = ()
    marks: tuple[str, ...] = ()
    short_ids: bool = False
    inner: tuple[str, ...] = ()
    bare: bool = False


GENERIC, OPENAI = "generic", "openai"
_HERMES = partial(JsonCalls, begin=TOOL_CALL, end=END_TOOL_CALL)
_EXAMPLE = "func_name1("
# Texts that all occur in a chat template of the format. pythonic follows formats whose templates have its text too.
_TEMPLATE_TEXTS = {
    "glm45": ("<arg_key>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "seed_oss": ("<seed:tool_call>",),
    "qwen3_coder": ("<function=", "<parameter="),
    "hy_v3": ("<tool_sep>", "<arg_key>"),
    "step3": ("<steptml:invoke",),
    "deepseek_v32": ("｜DSML｜",),
    "minimax_m3": (MINIMAX,),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "deepseek_v3": (DEEPSEEK_SEPARATOR, FENCE),
    "deepseek_v31": (DEEPSEEK_SEPARATOR,),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
    "gemma4": ("<|tool_call>", "call:"),
    "functiongemma": ("<start_function_call>",),
    "olmo3": ("<function_calls>",),
    "lfm2": ("<|tool_list_start|>",),
    "llama4_pythonic": (_EXAMPLE, "<|python_start|>"),
    "pythonic": (_EXAMPLE,),
}


def _format(name: str, begin: str, end: str, reader: Any, inner: Iterable[str], **more: Any) -> ToolFormat:
    """Create a format whose parser needs all of its marks: those around a call, and those within."""
    texts, within = (_TEMPLATE_TEXTS[name],), tuple(filter(None, inner))
    return ToolFormat(begin, end, reader, texts, (*filter(None, (begin, end)), *within), inner=within, **more)


def _listed(
    begin: str,
    end: str = "",
    reader: type[ListCalls] = ListCalls,
    others: Mapping[str, str] = MappingProxyType({}),
    detectable: bool = True,
    bare: bool = False,
) -> ToolFormat:
    """Create a format of lists between marks. ``others``: marks that models may write instead, end mark by begin mark.
    ``detectable``: a chat template with ``begin`` has this format."""
    marks = tuple(filter(None, (begin, end, *(mark for pair in others.items() for mark in pair))))
    read = partial(reader, begin=begin, end=end, others=others)
    return ToolFormat(begin, end, read, ((begin,),) if detectable else (), marks, bare=bare)


LIST_FORMATS = {
    "granite": _listed("<|tool_call|>", others={TOOL_CALL: END_TOOL_CALL}),
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "cohere_command3": _listed("<|START_ACTION|>", "<|END_ACTION|>", CohereCalls),
    # An ordinary word, which is a mark only before a list.
    "phi4_mini_json": _listed("functools", bare=True),
    "apertus": _listed("<|tools_prefix|>", "<|tools_suffix|>", ApertusCalls),
    # xLAM shares its marks with other formats.
    "xlam": _listed(
        TOOL_CALL, END_TOOL_CALL, XlamCalls, {"[TOOL_CALLS]": "", "```json": "```"}, detectable=False, bare=True
    ),
}
# Keys are vLLM's names, except "generic": for chat templates without tools, or with calls in an unsupported format.
# `auto` selects the first format that the chat template describes.
TOOL_FORMATS: dict[str, ToolFormat] = {
    **{
        name: _format(name, form.begin, form.end, partial(XmlCalls, form=form), form.inner)
        for name, form in XML_FORMS.items()
    },
    **{
        name: _format(name, form.section, form.end_section, partial(NamedCalls, form=form), form.inner)
        for name, form in NAMED_FORMS.items()
    },
    **LIST_FORMATS,
    **{
        name: _format(name, form.begin, form.end, partial(LiteralCalls, form=form), (form.quote,), bare=form.listed)
        for name, form in ((name, LITERAL_FORMS[name]) for name in _TEMPLATE_TEXTS if name in LITERAL_FORMS)
    },
    "ernie45": ToolFormat(TOOL_CALL, END_TOOL_CALL, _HERMES, ((TOOL_CALL, "<response>"),), (TOOL_CALL, END_TOOL_CALL)),
    "hermes": ToolFormat(TOOL_CALL, END_TOOL_CALL, _HERMES, ((TOOL_CALL,),), (TOOL_CALL, END_TOOL_CALL)),
    "mistral": ToolFormat(
        "[TOOL_CALLS]",
        "",
        partial(MistralCalls, begin="[TOOL_CALLS]"),
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        True,
    ),
    "llama3_json": ToolFormat(
        "<|python_tag|>",
        "",
        partial(LlamaCalls, begin="<|python_tag|>", others={"{": ""}),
        (("<|python_tag|>",), ('{"name": function name, "parameters"',)),
        ("<|python_tag|>",),
        bare=True,
    ),
    "internlm": ToolFormat(
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        partial(JsonCalls, begin="<|action_start|><|plugin|>", end="<|action_end|>"),
        (("<|action_start|>",),),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    OPENAI: ToolFormat(
        HarmonyMark.CHANNEL,
        HarmonyMark.CALL,
        HarmonyAnswer,
        ((HarmonyMark.CHANNEL, NAME_PREFIX),),
        HARMONY_MARKS,
        inner=HARMONY_MARKS,
    ),
    GENERIC: ToolFormat(TOOL_CALL, END_TOOL_CALL, _HERMES),
}
TOOL_ALIASES = {
    "apertus2509": "apertus",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "glm": "glm45",
    "glm47": "glm45",
    "gpt-oss": OPENAI,
    "granite4": "hermes",
    "hunyuan": "hunyuan_a13b",
    "interns1": "internlm",
    "jamba": "hunyuan_a13b",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}
# Formats in which tools, calls and results go into the prompt as text if the template does not support them.
SPELLED_OUT = ("hermes", GENERIC)


def spelling(name: str) -> tuple[str, str, str]:
    """Return how calls are written into content if a chat template does not support them: the marks, and "object" for
    a JSON object each, "list" for one list, or "literal" for a list in Python's notation. Formats with other notations
    use the generic one's."""
    form, kind = TOOL_FORMATS.get(name, TOOL_FORMATS[GENERIC]), "object"
    if name in LIST_FORMATS:
        kind = "list"
    elif name in LITERAL_FORMS and LITERAL_FORMS[name].listed:
        kind = "literal"
    elif getattr(form.reader, "func", None) is not JsonCalls:
        form = TOOL_FORMATS[GENERIC]
    return form.begin, form.end, kind
