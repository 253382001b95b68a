"""Fields of any API's body that request structured outputs; structure_reading.py parses them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import AnyJson, Ignored, JsonObject, JsonObjects, JsonShape


class FormatBody(msgspec.Struct, forbid_unknown_fields=True):
    """Structure of an answer as an object, in the form of OpenAI, Anthropic, vLLM, llama.cpp or TGI.

    Attributes:
        type: "text", "json_object" or "json", "json_schema", "regex", "grammar", or "structural_tag".
        json_schema: the schema, with or without OpenAI's wrapping of name, schema and strict.
        schema, value: the schema, as in other servers; the value of a "regex" or a "grammar" is its text.
        pattern, regex: the expression of a "regex".
        grammar: a grammar in Lark's or GBNF's syntax.
        structures: the begin, schema and end of each part of a "structural_tag".
        triggers: texts after which one of the structures must follow.
        format: the newer, nested form of structures and triggers.
        name: the schema's name; without influence on the answer.
        description: the schema's purpose; not passed to the model.
        strict: every answer matches the whole schema, also without it.
    """

    type: str = ""
    json_schema: JsonObject = Raw()
    schema: JsonShape = Raw()
    value: AnyJson = Raw()
    pattern: str | None = None
    regex: str | None = None
    grammar: str | None = None
    structures: JsonObjects = Raw()
    triggers: list[str] | None = None
    format: JsonObject = Raw()
    name: str | None = None
    description: Ignored[Raw] = Raw()
    strict: bool | None = None


AnyFormat = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": ["object", "string", "null"]})]


class FormatHolder(msgspec.Struct, forbid_unknown_fields=True):
    """A format inside the options of an answer, as in other APIs.

    Attributes:
        format: the structure of the answer.
    """

    format: AnyFormat = Raw()


class TextConfig(FormatHolder, forbid_unknown_fields=True):
    """Options of the answer's text, as in Responses.

    Attributes:
        verbosity: no model's template has it; describe the wanted length in the instructions.
    """

    verbosity: Ignored[Raw] = Raw()


class ShapeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Structure of the answer in vLLM's form; exactly one field is set.

    Attributes:
        json: a JSON schema, or its text.
        regex: a regular expression that matches the whole answer.
        choice: possible answers.
        grammar: a grammar in Lark's or GBNF's syntax.
        json_object: whether the answer is any JSON object.
        structural_tag: free text with structured parts, as text.
        disable_any_whitespace, whitespace_pattern: whitespace in JSON is that of Python's json.
    """

    json: JsonShape = Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: Ignored[Raw] = Raw()
    disable_additional_properties: Raw = Raw()
    whitespace_pattern: Ignored[Raw] = Raw()


class StructureBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Requests for a structure of the answer; at most one is set. Each body has the fields of all APIs.

    Attributes:
        response_format: the structure of the answer, in OpenAI's or other servers' form.
        format: Ollama's name of response_format: a JSON schema or "json".
        output_format: Anthropic's name of response_format.
        text: contains the format in Responses.
        output_config: contains the format in Messages.
        structured_outputs: the structure of the answer, in vLLM's form.
        json_schema: a JSON schema, as in llama.cpp and SGLang.
        regex: an expression that matches the whole answer, as in SGLang.
        grammar: a grammar in Lark's or GBNF's syntax, as in llama.cpp, or TGI's object of type and value.
        ebnf: SGLang's name of grammar.
        guided_json, guided_regex, guided_choice, guided_grammar: older names of the fields of structured_outputs.
    """

    response_format: AnyFormat = Raw()
    format: AnyFormat = Raw()
    output_format: AnyFormat = Raw()
    text: TextConfig | None = None
    output_config: FormatHolder | None = None
    structured_outputs: Raw = Raw()
    json_schema: JsonShape = Raw()
    regex: str | None = None
    grammar: AnyFormat = Raw()
    ebnf: str | None = None
    guided_json: JsonShape = Raw()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


# Names of structure fields in other servers, in lower case without "_" and "-". Unknown fields with these names are
# refused, at the top of a body or in the objects in CARRIERS.
OTHER_SPELLINGS = frozenset(
    {
        *("responseformat", "responseschema", "responsejsonschema", "outputschema", "schema", "jsonmode"),
        *("outputformat", "outputconfig", "structuredoutput", "structuredoutputs", "structuraltag"),
        *("jsonschema", "guidedjson", "guidedregex", "guidedchoice", "guidedgrammar", "guideddecoding"),
        *("regexpattern", "grammarstring", "gbnf", "lark", "constraint", "constraints", "ebnf", "grammar", "regex"),
        *("format", "responsemimetype"),
    }
)
CARRIERS = frozenset({"extrabody", "nvext", "options", "parameters", "generationconfig", "samplingparams"})
