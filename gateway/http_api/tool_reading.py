"""Parsing of tools and tool choice, in the forms of all APIs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pillion.gateway.http_api.body_reading import given, note_ignored
from pillion.gateway.http_api.custom_tools import ToolGrammar, custom_tool
from pillion.gateway.http_api.http_errors import refused
from pillion.gateway.http_api.json_objects import compact_json
from pillion.gateway.http_api.tool_fields import ChoiceBody, CustomBody, FunctionBody, InputFormat, ToolBody, ToolChoice
from pillion.gateway.request.validation import MAX_TOOLS
from pillion.types import Tool, ToolOptions

# Tool choice as a word, in any API -> the gateway's.
_CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


def model_tool_name(namespace: str | None, name: str) -> str:
    """Return a tool's name for the model, prefixed by its namespace, if any, since models have no namespaces."""
    return name if not namespace else f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


class ParsedTools:
    """Parsed tools and tool choice of a body. Server-side tools are dropped, and noted as without effect.

    Raises ApiError.

    Attributes:
        tools: tools that are offered to the model.
        custom: names of the custom tools among them.
        namespaced: the model's name of a tool -> its namespace, and its name in it.
        names: the gateway's names of the tools' fields -> the client's.
        options: the tools with the tool choice, for the gateway.
    """

    def __init__(self, bodies: Sequence[ToolBody], choice: ToolChoice | None, parallel: bool | None = None) -> None:
        if len(bodies) > MAX_TOOLS:
            raise refused("tools", f"{len(bodies)} tools; at most {MAX_TOOLS}")
        self.tools: list[Tool] = []
        self.custom: set[str] = set()
        self.namespaced: dict[str, tuple[str, str]] = {}
        self.names: dict[str, str] = {}
        for n, body in enumerate(bodies):
            if body.type == "namespace":
                for m, inner in enumerate(body.tools or ()):
                    self._add(inner, f"tools[{n}].tools[{m}]", body.name, body.description if m == 0 else None)
            else:
                self._add(body, f"tools[{n}]")
        options = ToolOptions(tools=tuple(self.tools), parallel_tool_calls=parallel)
        self.options = self._with_choice(options, choice)

    def _add(self, body: ToolBody, path: str, namespace: str | None = None, namespace_text: str | None = None) -> None:
        gemini, field = body.gemini_functions, "functionDeclarations"
        if body.function_declarations is not None:
            gemini, field = body.function_declarations, "function_declarations"
        (schema, _) = body.schema()
        if body.function is not None:
            self._add_function(body.function, body.function.name, f"{path}.function", namespace, namespace_text)
        elif body.custom is not None:
            self._add_custom(body.custom, body.custom.name, f"{path}.custom", namespace, namespace_text)
        elif gemini is not None:
            for n, function in enumerate(gemini):
                self._add_function(function, function.name, f"{path}.{field}[{n}]", namespace, namespace_text)
        elif body.name and (body.type in (None, "function") or given(schema)):
            self._add_function(body, body.name, path, namespace, namespace_text)
        elif body.name and body.type == "custom":
            self._add_custom(body, body.name, path, namespace, namespace_text)
        else:
            note_ignored(f"tools.{body.type}")

    def _add_function(
        self,
        body: FunctionBody | ToolBody,
        name: str,
        path: str,
        namespace: str | None,
        namespace_text: str | None,
    ) -> None:
        schema, field = body.schema()
        parameters = compact_json(schema, f"{path}.{field}", dict) if given(schema) else ""
        text = "\n\n".join(filter(None, (namespace_text, body.description)))
        tool = Tool(name=model_tool_name(namespace, name), description=text, parameters=parameters, strict=body.strict)
        self._add_tool(tool, path, f"{path}.{field}", namespace, name)

    def _add_custom(
        self,
        body: CustomBody | ToolBody,
        name: str,
        path: str,
        namespace: str | None,
        namespace_text: str | None,
    ) -> None:
        text = "\n\n".join(filter(None, (namespace_text, body.description)))
        tool = custom_tool(model_tool_name(namespace, name), text, _grammar(body.format, f"{path}.format"))
        self.custom.add(tool.name)
        self._add_tool(tool, path, f"{path}.format", namespace, name)

    def _add_tool(self, tool: Tool, path: str, schema_path: str, namespace: str | None, name: str) -> None:
        if namespace is not None:
            self.namespaced[tool.name] = (namespace, name)
        field = f"tools.tools[{len(self.tools)}]"
        self.names |= {f"{field}.parameters": schema_path, field: path}
        self.tools.append(tool)

    def _with_choice(self, options: ToolOptions, choice: ToolChoice | None) -> ToolOptions:
        if choice is None or isinstance(choice, str):
            return replace(options, choice=_CHOICES[choice] if choice else "")
        if choice.disable_parallel_tool_use is not None:
            self.names["tools.parallel_tool_calls"] = "tool_choice.disable_parallel_tool_use"
            options = replace(options, parallel_tool_calls=not choice.disable_parallel_tool_use)
        if choice.type in _CHOICES:
            self.names["tools.choice"] = "tool_choice.type"
            return replace(options, choice=_CHOICES[choice.type])
        if choice.type == "allowed_tools":
            return self._with_allowed(options, choice)
        name, path = _chosen_name(choice)
        if not path:
            reason = f"{choice.type[:100]!r} is not supported here"
            raise refused("tool_choice.type", reason, "unsupported_value")
        self.names["tools.name"] = f"tool_choice.{path}"
        return replace(options, choice="named", name=name)

    def _with_allowed(self, options: ToolOptions, choice: ChoiceBody) -> ToolOptions:
        field = "tool_choice.tools"
        mode, tools = choice.mode or "auto", choice.tools or []
        if choice.allowed_tools is not None:
            field = "tool_choice.allowed_tools.tools"
            mode, tools = choice.allowed_tools.mode, choice.allowed_tools.tools
        if not tools:
            raise refused(field, "at least one tool is needed")
        allowed = []
        for tool in tools:
            name, path = _chosen_name(tool)
            if path:
                allowed.append(name)
            else:
                note_ignored(f"{field}.{tool.type}")
        if not allowed and mode == "required":
            raise refused(field, "server-side tools cannot be called here", "unsupported_value")
        self.names["tools.allowed"] = field
        return replace(options, choice=mode if allowed else "none", allowed=tuple(allowed))


def _chosen_name(choice: ChoiceBody) -> tuple[str, str]:
    """Return the name of the chosen tool, and the field with it; "" and "" without a name or for a server-side tool."""
    for field, named in (("function", choice.function), ("custom", choice.custom)):
        if named is not None:
            return model_tool_name(named.namespace, named.name), f"{field}.name"
    if choice.name and choice.type in ("", "function", "custom", "tool"):
        return model_tool_name(choice.namespace, choice.name), "name"
    return "", ""


def _grammar(form: InputFormat | None, path: str) -> ToolGrammar | None:
    """Return the grammar of a custom tool's input, None for any text. Raises ApiError."""
    if form is None or form.type == "text":
        return None
    if form.grammar is not None:
        return form.grammar
    if form.syntax is None or form.definition is None:
        missing = "syntax" if form.syntax is None else "definition"
        raise refused(f"{path}.{missing}", "this field is required", "missing_required_parameter")
    return ToolGrammar(syntax=form.syntax, definition=form.definition)


def echoed_tools(bodies: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """Return tools as OpenAI's responses repeat them: without nesting; functions have all fields."""
    return [shown for body in bodies for shown in _echoed_tool(body)]


def _echoed_tool(body: ToolBody) -> list[dict[str, Any]]:
    if body.type == "namespace":
        inner = echoed_tools(body.tools or ())
        return [{"type": "namespace", "name": body.name, "description": body.description, "tools": inner}]
    if body.custom is not None or (body.type == "custom" and not given(body.schema()[0])):
        custom = body.custom or body
        shown: dict[str, Any] = {
            "type": "custom",
            "name": custom.name,
            "description": custom.description,
            "format": custom.format,
        }
        return [{name: value for name, value in shown.items() if value is not None}]
    functions: Sequence[FunctionBody | ToolBody] = body.gemini_functions or body.function_declarations or ()
    if not functions and (body.function or given(body.schema()[0]) or body.type in (None, "function")):
        functions = [body.function or body]
    return [
        {
            "type": "function",
            "name": function.name,
            "description": function.description,
            "strict": function.strict,
            "parameters": function.schema()[0] if given(function.schema()[0]) else None,
        }
        for function in functions
    ]
