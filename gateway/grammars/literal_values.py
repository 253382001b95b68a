"""Builds grammar rules for arguments in Python's notation and in Gemma's, from their JSON schemas. Sans-IO (I9).

members   key value, key value ...      in the order of the schema; optional ones may be omitted
values    Python's: JSON, except True, False and None
          Gemma's: a string between marks, a number, true, false, null, [value,value], {key:value,key:value}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from pillion.gateway.formats.xml_calls import MAX_KEY_CHARS
from pillion.gateway.grammars.answer_grammar import literal
from pillion.gateway.grammars.schema_dialects import TYPES
from pillion.gateway.grammars.schema_places import at_pointer, pointer

# Limits on the lengths of strings and lists that a grammar enforces; larger ones are ignored.
MAX_COUNTED_CHARS = 1024
MAX_COUNTED_ITEMS = 64
KEY = rf"/[A-Za-z_][A-Za-z0-9_]{{0,{MAX_KEY_CHARS - 1}}}/"
_PYTHON_LITERALS = {True: "True", False: "False", None: "None"}
_PLAIN_KEY = re.compile(r"[^\s=:,(){}\[\]<\"']+")
_UNSUPPORTED = ("allOf", "prefixItems", "additionalItems", "patternProperties", "minProperties", "maxProperties")
UNSUPPORTED_WITH_PROPERTIES = (*_UNSUPPORTED, "anyOf", "oneOf", "$ref", "enum", "const")
_NUMBERS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def members(name: str, pairs: Sequence[tuple[str, bool]], comma: str, rules: list[str]) -> str:
    """Return a rule for an object's members in order, separated by ``comma``.

    ``pairs``: per member, its rule and whether it is required. Auxiliary rules, whose names begin with ``name``, are
    appended to ``rules``.
    """
    separator, begins = literal(comma), []
    for number, (pair, needed) in enumerate(pairs):
        following = f"{name}_from_{number + 1}" if number + 1 < len(pairs) else ""
        begins.append(f"{pair} {following}")
        if number:
            one = f"{separator} {pair}"
            rules.append(f"{name}_from_{number}: {one if needed else f'({one})?'} {following}")
    # An object begins with its first required member, or an optional one before it.
    first = next((number for number, (_, needed) in enumerate(pairs) if needed), None)
    if first is None:
        return f"({' | '.join(begins)})?" if begins else '""'
    return f"({' | '.join(begins[: first + 1])})"


def is_plain_key(key: str) -> bool:
    """Return whether a key needs no quotes."""
    return len(key) <= MAX_KEY_CHARS and _PLAIN_KEY.fullmatch(key) is not None


def python_value(schema: Mapping[str, Any], json_rule: Callable[[Any], str]) -> str:
    """Return a rule for a value of ``schema`` in Python's notation; ``json_rule`` returns the rule for JSON."""
    values = values_of(schema)
    if values is not None:
        return "(" + " | ".join(literal(_in_python(value)) for value in values) + ")"
    if schema.get("type") in ("boolean", "null") and not {"anyOf", "oneOf", "allOf", "$ref"} & set(schema):
        return '("True" | "False")' if schema["type"] == "boolean" else '"None"'
    return json_rule(schema)


def properties_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yield the properties of an object's schema: key, value's schema, and whether it is required."""
    listed, others, given = (schema.get(word) for word in ("required", "additionalProperties", "properties"))
    properties = given if isinstance(given, dict) else {}
    required = [key for key in listed if isinstance(key, str)] if isinstance(listed, list) else []
    for key in dict.fromkeys((*properties, *(required if others is not False else ()))):
        value = properties.get(key, others)
        yield key, value if isinstance(value, dict) else {}, key in required


def lacks_members(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema requires a property that it does not define."""
    properties, required = schema.get("properties"), schema.get("required")
    named = properties if isinstance(properties, dict) else {}
    return isinstance(required, list) and any(isinstance(one, str) and one not in named for one in required)


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of a schema's enum or const, or None."""
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    return values if isinstance(values, list) and values else None


def _in_python(value: Any) -> str:
    return (
        _PYTHON_LITERALS[value] if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
    )


class GemmaValues:
    """Builder of rules for values in Gemma's notation.

    Args:
        root: schema of a tool's arguments, for references.
        name: prefix of rule names.
        mark: mark around strings, as a term of the grammar and as text.
        is_token: whether the mark is a special token.
        json_rule: returns a rule for JSON of a schema, given with its place, a JSON pointer.
        rules: receives auxiliary rules.
        leave_out: called with each place in the schema that cannot be enforced, as a JSON pointer, and the reason.
    """

    def __init__(
        self,
        root: Mapping[str, Any],
        name: str,
        mark: tuple[str, str],
        is_token: bool,
        json_rule: Callable[[Any, str], str],
        rules: list[str],
        leave_out: Callable[[str, str], None],
    ) -> None:
        self._root = root
        self._name = name
        self._term, self._mark = mark
        self._is_token = is_token
        self._json = json_rule
        self._rules = rules
        self._leave_out = leave_out
        self._referred: dict[str, str] = {}
        self._name_count = 0
        self._free = ""

    def pairs(self, schema: Mapping[str, Any], name: str, place: str = "") -> str:
        """Return a rule for the members, without brackets, of an object with ``schema``, which is at ``place``. Raises
        InvalidRequest."""
        known = list(properties_of(schema))
        if not known and schema.get("additionalProperties") is not False:
            pair = f'{KEY} ":" {self.any()}'
            return f'({pair} ("," {pair})*)?'
        made = []
        for key, value, needed in known:
            inner = place + pointer(("properties", key))
            if is_plain_key(key):
                made.append((f'{literal(key)} ":" {self.value(value, inner)}', needed))
            else:
                self._leave_out(inner, f"the model cannot write the property {key!r}")
        return members(name, made, ",", self._rules)

    def value(self, schema: Mapping[str, Any], place: str) -> str:
        """Return a rule for a value of ``schema``, which is at ``place``. Raises InvalidRequest if the notation cannot
        express it."""
        for word in filter(schema.__contains__, _UNSUPPORTED):
            self._leave_out(place + pointer([word]), f"this model's notation of calls does not support {word!r}")
        if (values := values_of(schema)) is not None:
            spelled = [self._spelled(one) for one in values if self._can_spell(one)]
            if spelled:
                return "(" + " | ".join(spelled) + ")"
            text = f"the model cannot write {json.dumps(values[0], ensure_ascii=False)}"
            self._leave_out(f"{place}/{'enum' if 'enum' in schema else 'const'}", text)
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        for word in ("anyOf", "oneOf"):
            options = schema.get(word)
            if isinstance(options, list):
                inner = [
                    self.value(one if isinstance(one, dict) else {}, f"{place}/{word}/{n}")
                    for n, one in enumerate(options)
                ]
                return f"({' | '.join(inner)})"
        given = schema.get("type")
        kinds = [given] if isinstance(given, str) else given
        if not isinstance(kinds, list):
            kinds = ["object"] if "properties" in schema else ["array"] if "items" in schema else []
        known = [kind for kind in kinds if kind in TYPES]
        return "(" + " | ".join(self._of_kind(kind, schema, place) for kind in known) + ")" if known else self.any()

    def any(self) -> str:
        """Return a rule for any value."""
        if not self._free:
            self._free = f"{self._name}_any"
            pair = f'{KEY} ":" {self._free}'
            self._rules.append(
                f'{self._free}: {self.text()} | {self._json({"type": "number"}, "")} | "true" | "false" | "null"'
                f' | "[" ({self._free} ("," {self._free})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            )
        return self._free

    def text(self, low: int = 0, high: int | None = None) -> str:
        """Return a rule for a string of ``low`` to ``high`` characters (None: unlimited) between its marks."""
        max_chars = "" if high is None else high
        return f"{self._term} {self.up_to_mark(f'(?s:.{{{low},{max_chars}}})')}"

    def up_to_mark(self, expression: str) -> str:
        """Return a rule for a match of ``expression`` up to the first mark, and the mark."""
        if self._is_token:
            return f"/{expression}/ {self._term}"
        name, mark = self._new_name("text"), re.escape(self._mark).replace("/", r"\/")
        ended = f"/{expression}{mark}/ & ~/(?s:.*){mark}(?s:.+)/"
        self._rules += [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: {ended}"]
        return name

    def _of_kind(self, kind: str, schema: Mapping[str, Any], place: str) -> str:
        if kind == "string":
            low, high = (bound(schema, word, MAX_COUNTED_CHARS) for word in ("minLength", "maxLength"))
            return self.text(low or 0, high if high is None or high >= (low or 0) else None)
        if kind == "object":
            name = self._new_name("object")
            self._rules.append(f'{name}: "{{" {self.pairs(schema, name, place)} "}}"')
            return name
        if kind == "array":
            return self._list(schema, place)
        if kind in ("number", "integer"):
            return self._json({**{word: schema[word] for word in _NUMBERS if word in schema}, "type": kind}, place)
        return '"null"' if kind == "null" else '"true" | "false"'

    def _list(self, schema: Mapping[str, Any], place: str) -> str:
        inner = schema.get("items")
        item = self.value(inner, f"{place}/items") if isinstance(inner, dict) else self.any()
        name = self._new_name("item")
        self._rules.append(f"{name}: {item}")
        low, high = (bound(schema, word, MAX_COUNTED_ITEMS) for word in ("minItems", "maxItems"))
        if high == 0:
            return '"[]"'
        max_more = "" if high is None or high < (low or 0) else str(high - 1)
        several = f'{name} ("," {name}){{{max(0, (low or 0) - 1)},{max_more}}}'
        return f'"[" {several} "]"' if low else f'"[" ({several})? "]"'

    def _reference(self, reference: str) -> str:
        """Return the name of the rule of a reference's target; one rule per target, since references may be
        recursive."""
        if reference not in self._referred:
            place = unquote(reference.removeprefix("#"))
            target: Any = self._root
            for part in at_pointer(self._root, (), place) or ():
                target = target[part]
            name = self._referred[reference] = self._new_name("place")
            self._rules.append(f"{name}: {self.value(target if isinstance(target, dict) else {}, place)}")
        return self._referred[reference]

    def _can_spell(self, value: Any) -> bool:
        """Return whether a value can be written: no string in it has a mark, and its keys need no quotes."""
        if isinstance(value, dict):
            return all(map(is_plain_key, value)) and all(map(self._can_spell, value.values()))
        return all(map(self._can_spell, value)) if isinstance(value, list) else self._mark not in str(value)

    def _spelled(self, value: Any) -> str:
        """Return a rule for one value."""
        if isinstance(value, str):
            return f"{self._term} {literal(value)} {self._term}" if value else f"{self._term} {self._term}"
        if isinstance(value, list):
            return _bracketed("[]", map(self._spelled, value))
        if isinstance(value, dict):
            pairs = [f'{literal(key)} ":" {self._spelled(one)}' for key, one in value.items()]
            return _bracketed("{}", pairs)
        return literal(json.dumps(value))

    def _new_name(self, what: str) -> str:
        self._name_count += 1
        return f"{self._name}_{what}_{self._name_count}"


def _bracketed(brackets: str, rules: Iterable[str]) -> str:
    inner = ' "," '.join(rules)
    return f'"{brackets[0]}" {inner} "{brackets[1]}"'


def bound(schema: Mapping[str, Any], word: str, max_bound: int) -> int | None:
    """Return a schema's value of ``word``, e.g. "maxLength"; None if it has none, or one above ``max_bound``, to which
    grammars do not count."""
    given = schema.get(word)
    return given if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= max_bound else None
