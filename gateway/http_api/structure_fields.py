"""Defines the fields by which a body of any API asks for the structure of an answer; asked_structure.py reads them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.json_objects import AnyJson, Ignored, JsonObject, JsonObjects, JsonShape


class FormatBody(msgspec.Struct, forbid_unknown_fields=True):
    """Describes the structure of an answer as an object, in the words of OpenAI, Anthropic, vLLM, llama.cpp or TGI.

    Attributes:
        type: "text", "json_object" or "json", "json_schema", "regex", "grammar", or "structural_tag".
        json_schema: the schema, within OpenAI's wrapping of name, schema and strict or without it.
        schema, value: the schema, as other servers have it; the value of a "regex" or a "grammar" is its text.
        pattern, regex: the expression of a "regex".
        grammar: a grammar in Lark's notation, or in GBNF's.
        structures: the begin, schema and end of each part of a "structural_tag".
        triggers: texts after which one of the structures has to follow.
        format: the newer notation of structures and triggers, which nests.
        name: the schema's name; the answer does not depend on it.
        description: what the schema is for; the model does not see it.
        strict: every answer fits the whole schema, also without it.
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


# A format is read from its raw JSON: an object as FormatBody describes it, a JSON schema, or the name of a type.
AnyFormat = Annotated[Raw, msgspec.Meta(extra_json_schema={"type": ["object", "string", "null"]})]


class FormatHolder(msgspec.Struct, forbid_unknown_fields=True):
    """Holds a format as the options of an answer in another API do.

    Attributes:
        format: the structure of the answer.
    """

    format: AnyFormat = Raw()


class TextConfig(FormatHolder, forbid_unknown_fields=True):
    """Sets options of the answer's text, as Responses has them.

    Attributes:
        verbosity: a wish for a longer or shorter answer; no model's template has it, so say it in the instructions.
    """

    verbosity: Ignored[Raw] = Raw()


class ShapeBody(msgspec.Struct, forbid_unknown_fields=True):
    """Sets the structure of the answer in vLLM's words; exactly one field is given.

    Attributes:
        json: a JSON schema, or its text.
        regex: a regular expression that the whole answer matches.
        choice: texts of which the answer is one.
        grammar: a grammar in Lark's notation, or in GBNF's.
        json_object: whether any JSON object will do.
        structural_tag: free text with parts of a given structure, as text.
        disable_any_whitespace, whitespace_pattern: JSON is written as Python's json writes it.
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
    """Asks for the structure of an answer; one field at most is given. The fields are those of all APIs, in each body.

    Attributes:
        response_format: the structure of the answer, in OpenAI's words or in those of other servers.
        format: other name of response_format: Ollama's, whose value is a JSON schema or "json".
        output_format: other name of response_format: Anthropic's.
        text: has the format as Responses does.
        output_config: has the format as Messages does.
        structured_outputs: the structure of the answer, in vLLM's words.
        json_schema: a JSON schema, as llama.cpp and SGLang have it.
        regex: an expression that the whole answer matches, as SGLang has it.
        grammar: a grammar in Lark's notation or GBNF's, as llama.cpp has it, or TGI's object of type and value.
        ebnf: other name of grammar: SGLang's.
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


# Further spellings by which servers ask for a structure, in small letters without "_" and "-". A field of such a name
# is refused, and so is one in an object that holds a server's own fields.
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
