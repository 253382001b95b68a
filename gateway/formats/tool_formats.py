"""Lists the tool formats in a table: how a chat template shows each one, and what reads it. Sans-IO (I9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pillion.gateway.formats.answer_parts import AnswerParts, PendingText
from pillion.gateway.formats.harmony import CALL, CHANNEL, FUNCTIONS, HARMONY_MARKS, HarmonyAnswer
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

# This maps the names of a request's tools to the schemas of their arguments.
ToolSchemas = Mapping[str, Mapping[str, Any]]
CallReader = JsonCalls | XmlCalls | LiteralCalls | HarmonyAnswer


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Describes a tool format.

    Attributes:
        begin, end: the marks around a call; ``end`` is "" where there is none.
        reader: makes what reads an answer's text.
        found: groups of texts; a chat template that holds all texts of one group has this format.
        marks: texts of special tokens that ``reader`` needs to see.
        inner: further marks, within a call.
        short_ids: whether the template takes ids of nine letters and digits only.
        bare: whether a call may stand without any mark, so that none is looked for in reasoning.
    """

    begin: str
    end: str
    reader: Callable[[PendingText, AnswerParts, ToolSchemas], CallReader]
    found: tuple[tuple[str, ...], ...] = ()
    marks: tuple[str, ...] = ()
    short_ids: bool = False
    inner: tuple[str, ...] = ()
    bare: bool = False


GENERIC, OPENAI = "generic", "openai"
# Chat templates of these formats of elements have these texts.
_XML_FOUND = {
    "glm45": ("<arg_key>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "seed_oss": ("<seed:tool_call>",),
    "qwen3_coder": ("<function=", "<parameter="),
    "hy_v3": ("<tool_sep>", "<arg_key>"),
    "step3": ("<steptml:invoke",),
    "deepseek_v32": ("｜DSML｜",),
    "minimax_m3": (MINIMAX,),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
}
# So have those of the formats of names between marks, and of lists between marks.
_NAMED_FOUND = {
    "deepseek_v3": (DEEPSEEK_SEPARATOR, FENCE),
    "deepseek_v31": (DEEPSEEK_SEPARATOR,),
    "kimi_k2": ("<|tool_calls_section_begin|>",),
}
COHERE, PHI4_MINI, APERTUS, XLAM = "cohere_command3", "phi4_mini_json", "apertus", "xlam"
INTERNLM, INTERNLM_MARKS = "internlm", ("<|action_start|><|plugin|>", "<|action_end|>")
LIST_MARKS = {
    "granite": ("<|tool_call|>", ""),
    "hunyuan_a13b": ("<tool_calls>", "</tool_calls>"),
    COHERE: ("<|START_ACTION|>", "<|END_ACTION|>"),
    # This mark is a word, which counts where a list follows.
    PHI4_MINI: ("functools", ""),
    APERTUS: ("<|tools_prefix|>", "<|tools_suffix|>"),
    XLAM: (TOOL_CALL, END_TOOL_CALL),
}
# Models write these marks instead, the end's by that of the begin.
_OTHER_MARKS = {
    "granite": {TOOL_CALL: END_TOOL_CALL},
    XLAM: {"[TOOL_CALLS]": "", "```json": "```"},
}
_LIST_READERS: Mapping[str, type[ListCalls]] = {COHERE: CohereCalls, APERTUS: ApertusCalls, XLAM: XlamCalls}
_HERMES = partial(JsonCalls, begin=TOOL_CALL, end=END_TOOL_CALL)
# The system prompts that tell models of Python's calls have this example.
_EXAMPLE = "func_name1("
_LITERAL_FOUND = {
    "gemma4": ("<|tool_call>", "call:"),
    "functiongemma": ("<start_function_call>",),
    "olmo3": ("<function_calls>",),
    "lfm2": ("<|tool_list_start|>",),
    "llama4_pythonic": (_EXAMPLE, "<|python_start|>"),
    "pythonic": (_EXAMPLE,),
}
# The formats have the names that vLLM gives them, but for the generic one, which is for models whose chat templates
# know no tools, or call tools in a way that Pillion does not read. `auto` takes the first format that the chat template
# speaks of.
TOOL_FORMATS: dict[str, ToolFormat] = {
    **{
        name: ToolFormat(
            form.begin,
            form.end,
            partial(XmlCalls, form=form),
            (_XML_FOUND[name],),
            (form.begin, form.end, *form.inner),
            inner=form.inner,
        )
        for name, form in XML_FORMS.items()
    },
    **{
        name: ToolFormat(
            named.section,
            named.end_section,
            partial(NamedCalls, form=named),
            (_NAMED_FOUND[name],),
            (named.section, named.end_section, *named.inner),
            inner=named.inner,
        )
        for name, named in NAMED_FORMS.items()
    },
    **{
        name: ToolFormat(
            *marks,
            partial(
                _LIST_READERS.get(name, ListCalls), begin=marks[0], end=marks[1], others=_OTHER_MARKS.get(name, {})
            ),
            # The marks of xLAM's calls are those of other formats.
            ((marks[0],),) if name != XLAM else (),
            tuple(filter(None, (*marks, *(mark for pair in _OTHER_MARKS.get(name, {}).items() for mark in pair)))),
            bare=name in (XLAM, PHI4_MINI),
        )
        for name, marks in LIST_MARKS.items()
    },
    **{
        name: ToolFormat(
            literal.begin,
            literal.end,
            partial(LiteralCalls, form=literal),
            (found,),
            tuple(filter(None, (literal.begin, literal.end, literal.quote))),
            inner=tuple(filter(None, (literal.quote,))),
            bare=literal.listed,
        )
        for name, found in _LITERAL_FOUND.items()
        for literal in (LITERAL_FORMS[name],)
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
    INTERNLM: ToolFormat(
        *INTERNLM_MARKS,
        partial(JsonCalls, begin=INTERNLM_MARKS[0], end=INTERNLM_MARKS[1]),
        (("<|action_start|>",),),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    OPENAI: ToolFormat(CHANNEL, CALL, HarmonyAnswer, ((CHANNEL, FUNCTIONS),), HARMONY_MARKS, inner=HARMONY_MARKS),
    GENERIC: ToolFormat(TOOL_CALL, END_TOOL_CALL, _HERMES),
}
# Other names of formats, as vLLM and SGLang have them.
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
    "interns1": INTERNLM,
    "jamba": "hunyuan_a13b",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "minimax-m2": "minimax_m2",
    "minimax-m3": "minimax_m3",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
}
# In these formats tools, calls and results are told to a model as text, where its template has no place for them.
SPELLED_OUT = ("hermes", GENERIC)
