"""Defines tools, and the choice among them, in the shapes of all APIs: OpenAI's, flat or in "function", Anthropic's,
MCP's and Gemini's. Every body has them; tool_reading.py reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.custom_tools import ToolGrammar
from pillion.gateway.http_api.json_objects import Ignored, JsonObject

_OFFERED = (b"null", b'"function"', b'"custom"', b'"namespace"')


class SchemaFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Describes a function's arguments.

    Attributes:
        description: what the model reads of the function.
        parameters: the JSON schema of its arguments; without it, any object.
        input_schema, mcp_schema: other names of parameters: Anthropic's, and MCP's inputSchema.
        strict: whether its arguments always fit that schema; without it they do where the schema can be followed.
    """

    description: str | None = None
    parameters: JsonObject = Raw()
    input_schema: JsonObject = Raw()
    mcp_schema: JsonObject = msgspec.field(name="inputSchema", default=Raw())
    strict: bool | None = None

    def schema(self) -> tuple[Raw, str]:
        """Returns the schema of the arguments, and the name of its field."""
        named = (("parameters", self.parameters), ("input_schema", self.input_schema), ("inputSchema", self.mcp_schema))
        return next(((raw, name) for name, raw in named if raw), (Raw(), "parameters"))


class FunctionBody(SchemaFields, forbid_unknown_fields=True, kw_only=True):
    """Describes a function that the model may call.

    Attributes:
        name: at most 128 letters, digits and _ . : -
    """

    name: str


class InputFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Describes the form of a custom tool's input.

    Attributes:
        type: "text" for any text, or "grammar".
        grammar: the grammar of a "grammar".
        syntax, definition: the same grammar, as Responses has it.
    """

    type: Literal["text", "grammar"]
    grammar: ToolGrammar | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomBody(msgspec.Struct, forbid_unknown_fields=True):
    """Describes a custom tool, whose input is a text.

    Attributes:
        name: at most 128 letters, digits and _ . : -
        description: what the model reads of it.
        format: the form of the input; default: any text.
    """

    name: str
    description: str | None = None
    format: InputFormat | None = None


class ToolBody(SchemaFields, forbid_unknown_fields=True, kw_only=True):
    """Describes a tool in any of its shapes.

    Attributes:
        type: "function", "custom" or "namespace"; with a schema it may be left out. Tools of other types are those of
            servers, which the model is not offered.
        name: the tool's name, where it does not stand in function or custom.
        function: a function, as a chat has it.
        custom: a tool whose input is a text, as a chat has it.
        format: the form of a custom tool's input, as Responses has it.
        tools: the tools of a namespace; calls have its name, too.
        gemini_functions, function_declarations: functions, as Gemini has them.
        eager_input_streaming: arguments are always streamed as they come.
        defer_loading: the model reads of every tool from the beginning, and need not search for it.
        input_examples: the model does not see them; write them into the description.
        output_schema: what the function returns; the model does not see it.
        allowed_callers: the model itself calls every tool.
    """

    type: str | None = None
    name: str | None = None
    function: FunctionBody | None = None
    custom: CustomBody | None = None
    format: InputFormat | None = None
    tools: list[ToolBody] | None = None
    gemini_functions: list[FunctionBody] | None = msgspec.field(name="functionDeclarations", default=None)
    function_declarations: list[FunctionBody] | None = None
    eager_input_streaming: Ignored[Raw] = Raw()
    defer_loading: Ignored[Raw] = Raw()
    input_examples: Ignored[Raw] = Raw()
    output_schema: Ignored[Raw] = Raw()
    allowed_callers: Ignored[Raw] = Raw()

    @staticmethod
    def passed_over(sent: Mapping[str, Raw]) -> bool:
        """Returns whether an object is a tool of a server, of which the type alone is named as having no effect."""
        kind = bytes(sent.get("type", b""))
        return (
            bool(kind) and kind not in _OFFERED and sent.keys().isdisjoint(("parameters", "input_schema", "function"))
        )

    def __post_init__(self) -> None:
        # Every tool has to have a string, so that their number is bounded.
        inner = self.function, self.custom, self.gemini_functions, self.function_declarations
        needs_name = self.type in (None, "function", "custom", "namespace") and not any(inner)
        if needs_name and not self.name:
            raise ValueError("Object missing required field `name`")


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Names a function or a custom tool.

    Attributes:
        name: the name of one of the tools.
        namespace: the name of its namespace.
    """

    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Names the tools that may be called, of those that the model is offered.

    Attributes:
        mode: "auto", or "required" for at least one call.
        tools: the tools' names.
    """

    mode: Literal["auto", "required"]
    tools: list[ChoiceBody]


class ChoiceBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Says how tools may be called, as an object of any API.

    Attributes:
        type: "function", "custom" or "tool" for the one tool to call, "allowed_tools" for several, or one of the words
            "auto", "none", "any" and "required".
        function, custom: the tool to call, as a chat has it.
        name: the name of the tool to call.
        namespace: the name of its namespace.
        allowed_tools: the tools that may be called, as a chat has them.
        mode, tools: the same, as Responses has them.
        disable_parallel_tool_use: whether an answer has at most one call.
    """

    type: str = ""
    function: NamedTool | None = None
    custom: NamedTool | None = None
    name: str | None = None
    namespace: str | None = None
    allowed_tools: AllowedTools | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChoiceBody] | None = None
    disable_parallel_tool_use: bool | None = None

    @staticmethod
    def passed_over(sent: Mapping[str, Raw]) -> bool:
        """Returns whether an object names a tool of a server, as ToolBody does."""
        return ToolBody.passed_over(sent)

    def __post_init__(self) -> None:
        # Every object has to have a string, so that their number is bounded.
        if not (self.type or self.name or self.function or self.custom):
            raise ValueError("Object missing required field `type`")


ToolChoice = Literal["auto", "none", "required", "any"] | ChoiceBody
