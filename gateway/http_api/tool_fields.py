"""Fields of tools and tool choice in the forms of all APIs: OpenAI's, flat or in "function", Anthropic's, MCP's and
Gemini's. Every body accepts them; tool_reading.py parses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.custom_tools import ToolGrammar
from pillion.gateway.http_api.json_objects import Ignored, JsonObject


class SchemaFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments of a function.

    Attributes:
        description: description for the model.
        parameters: the JSON schema of the arguments; default: any object.
        input_schema, mcp_schema: Anthropic's name of parameters, and MCP's, inputSchema.
        strict: whether arguments always match the schema; without it they do if the schema is supported.
    """

    description: str | None = None
    parameters: JsonObject = Raw()
    input_schema: JsonObject = Raw()
    mcp_schema: JsonObject = msgspec.field(name="inputSchema", default=Raw())
    strict: bool | None = None

    def schema(self) -> tuple[Raw, str]:
        """Return the schema of the arguments, and the name of its field."""
        named = (("parameters", self.parameters), ("input_schema", self.input_schema), ("inputSchema", self.mcp_schema))
        return next(((raw, name) for name, raw in named if raw), (Raw(), "parameters"))


class FunctionBody(SchemaFields, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call.

    Attributes:
        name: at most 128 letters, digits and _ . : -
    """

    name: str


class InputFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Format of a custom tool's input.

    Attributes:
        type: "text" for any text, or "grammar".
        grammar: the grammar.
        syntax, definition: the same grammar, as in Responses.
    """

    type: Literal["text", "grammar"]
    grammar: ToolGrammar | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomBody(msgspec.Struct, forbid_unknown_fields=True):
    """A custom tool, whose input is text.

    Attributes:
        name: at most 128 letters, digits and _ . : -
        description: description for the model.
        format: the format of the input; default: any text.
    """

    name: str
    description: str | None = None
    format: InputFormat | None = None


class ToolBody(SchemaFields, forbid_unknown_fields=True, kw_only=True):
    """A tool in any supported form.

    Attributes:
        type: "function", "custom" or "namespace"; optional with a schema. Other types are server-side tools, which are
            not offered to the model.
        name: the tool's name, unless it is in function or custom.
        function: a function, as in chat completions.
        custom: a custom tool, as in chat completions.
        format: the format of a custom tool's input, as in Responses.
        tools: the tools of a namespace, which calls also name.
        gemini_functions, function_declarations: functions, as in Gemini's API.
        eager_input_streaming: arguments are always streamed.
        defer_loading: all tools are in the prompt from the start, so none is searched for.
        input_examples: not passed to the model; write them into the description.
        output_schema: schema of the function's result; not passed to the model.
        allowed_callers: only the model calls tools.
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
    def is_server_side(sent: Mapping[str, Raw]) -> bool:
        """Return True if an object is a server-side tool; only its type is then named as without effect."""
        kind = bytes(sent.get("type", b""))
        if kind in (b"", b"null", b'"function"', b'"custom"', b'"namespace"'):
            return False
        return sent.keys().isdisjoint(("parameters", "input_schema", "function"))

    def __post_init__(self) -> None:
        # So that every tool has a string, whose number is limited.
        inner = self.function, self.custom, self.gemini_functions, self.function_declarations
        needs_name = self.type in (None, "function", "custom", "namespace") and not any(inner)
        if needs_name and not self.name:
            raise ValueError("Object missing required field `name`")


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A choice of a function or custom tool.

    Attributes:
        name: the tool's name.
        namespace: the name of its namespace.
    """

    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The subset of the tools that may be called.

    Attributes:
        mode: "auto", or "required" for at least one call.
        tools: the tools' names.
    """

    mode: Literal["auto", "required"]
    tools: list[ChoiceBody]


class ChoiceBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Tool choice, as an object of any API.

    Attributes:
        type: "function", "custom" or "tool" for the one tool to call, "allowed_tools" for several, or "auto", "none",
            "any" or "required".
        function, custom: the tool to call, as in chat completions.
        name: the name of the tool to call.
        namespace: the name of its namespace.
        allowed_tools: the tools that may be called, as in chat completions.
        mode, tools: the same, as in Responses.
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
    def is_server_side(sent: Mapping[str, Raw]) -> bool:
        """Return True if an object names a server-side tool."""
        return ToolBody.is_server_side(sent)

    def __post_init__(self) -> None:
        if not (self.type or self.name or self.function or self.custom):
            raise ValueError("Object missing required field `type`")


ToolChoice = Literal["auto", "none", "required", "any"] | ChoiceBody
