"""Converts structural tags, in both of vLLM's notations, to a piece of a grammar. Sans-IO (I9).

{"structures": [{"begin", "schema", "end"}...], "triggers": [...]}     free text; after a trigger a whole structure
{"format": {"type": "triggered_tags" | "tag" | "sequence" | ...}}      the same and more, nested

A mark that is a special token may be written as the token or letter by letter; both are the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pillion.errors import FieldViolation, InvalidRequest
from pillion.gateway.grammars.answer_grammar import ANY_TEXT, Piece, cut_at_tokens, expression, literal, terms

MAX_TAGS = 256
MAX_TAG_DEPTH = 16


class StructuralTag:
    """Builder of the rules for a structural tag.

    Args:
        field: the client's field with the tag, for errors.
        json_piece: returns the piece for JSON of a schema in the tag, given with its field.
        token_ids: ids of the model's special tokens, by text.
    """

    def __init__(self, field: str, json_piece: Callable[[Any, str], Piece], token_ids: Mapping[str, int]) -> None:
        self._field = field
        self._token_ids = token_ids
        self._json_piece = json_piece
        self._rules: list[str] = [f"TAG_TEXT: {ANY_TEXT}"]
        self._sources: dict[str, Any] = {field: None}
        self._grammars: dict[str, str] = {}
        self._rule_makers: dict[str, Callable[[dict[str, Any], str, int], str]] = {
            "const_string": lambda one, at, _: self._term(self._string(one, "value", at)),
            "json_schema": lambda one, at, _: self._schema(self._value(one, "json_schema", at), f"{at}.json_schema"),
            "regex": lambda one, at, _: expression(self._string(one, "pattern", at), f"{self._field}.{at}.pattern"),
            "grammar": lambda one, at, _: self._grammar(self._string(one, "grammar", at)),
            "sequence": lambda one, at, depth: " ".join(self._elements(one, at, depth)),
            "or": lambda one, at, depth: " | ".join(self._elements(one, at, depth)),
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
            "any_text": lambda _one, _at, _depth: "TAG_TEXT",
        }

    def piece(self, parsed: Any) -> Piece:
        """Return the piece for the whole tag. Raises InvalidRequest, naming the place."""
        if isinstance(parsed, dict) and "structures" in parsed:
            tags = [
                {
                    "begin": one.get("begin"),
                    "content": {"type": "json_schema", "json_schema": one.get("schema", True)},
                    "end": one.get("end"),
                }
                if isinstance(one, dict)
                else one
                for one in self._list(parsed, "structures", "")
            ]
            body = self._triggered({"tags": tags, "triggers": parsed.get("triggers")}, "structures", 0)
        else:
            body = self._format(self._value(parsed, "format", ""), "format", 0)
        return Piece(body, tuple(self._rules), self._grammars, self._sources)

    def _format(self, one: Any, at: str, depth: int) -> str:
        kind = one.get("type") if isinstance(one, dict) else None
        if depth > MAX_TAG_DEPTH:
            raise self._wrong(at, f"nested more than {MAX_TAG_DEPTH} deep")
        if not isinstance(kind, str) or kind not in self._rule_makers:
            raise self._wrong(f"{at}.type", f"one of {', '.join(sorted(self._rule_makers))}")
        return f"({self._rule_makers[kind](one, at, depth)})"

    def _elements(self, one: dict[str, Any], at: str, depth: int) -> list[str]:
        elements = self._list(one, "elements", at)
        return [self._format(inner, f"{at}.elements[{n}]", depth + 1) for n, inner in enumerate(elements)]

    def _tag(self, one: Any, at: str, depth: int) -> str:
        """Return the rule for a tag's begin, content and end."""
        return f"{self._term(self._string(one, 'begin', at, empty=True))} {self._content(one, at, depth)}"

    def _content(self, one: Any, at: str, depth: int) -> str:
        """Return the rule for a tag's content and end."""
        content = self._value(one, "content", at)
        ends = one.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise self._wrong(f"{at}.end", "a text, or texts of which one ends it")
        end = "(" + " | ".join(map(literal, ends)) + ")"
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            # Up to the first occurrence of its end, since anything else that could follow would be text too.
            texts = [self._rule(f"TAG_TEXT {end}"), *filter(None, map(self._text_to_token, ends))]
            return f"({' | '.join(texts)})"
        end = "(" + " | ".join(map(self._term, ends)) + ")"
        return f"{self._format(content, f'{at}.content', depth + 1)} {end}"

    def _triggered(self, one: dict[str, Any], at: str, depth: int) -> str:
        triggers = self._list(one, "triggers", at)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self._wrong(f"{at}.triggers", "texts, none of them empty")
        tags = []
        for n, tag in enumerate(self._list(one, "tags", at)):
            place = f"{at}.tags[{n}]"
            begin = self._string(tag, "begin", place)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise self._wrong(f"{place}.begin", "it begins with none of the triggers")
            lead = self._rule(f"TAG_TEXT {literal(trigger)}")
            leads = [f"{lead} {literal(begin[len(trigger) :])}", *filter(None, [self._text_to_token(begin)])]
            tags.append(f"({' | '.join(leads)}) {self._content(tag, place, depth)}")
        some = "(" + " | ".join(tags) + ")"
        if one.get("stop_after_first"):
            return some if one.get("at_least_one") else f"{some} | TAG_TEXT"
        return f"{some}{'+' if one.get('at_least_one') else '*'} TAG_TEXT"

    def _separated(self, one: dict[str, Any], at: str, depth: int) -> str:
        tags = [self._tag(tag, f"{at}.tags[{n}]", depth) for n, tag in enumerate(self._list(one, "tags", at))]
        some, between = "(" + " | ".join(tags) + ")", self._term(self._string(one, "separator", at, empty=True))
        several = some if one.get("stop_after_first") else f"{some} ({between} {some})*"
        return several if one.get("at_least_one") else f"({several})?"

    def _schema(self, schema: Any, at: str) -> str:
        piece = self._json_piece(schema, f"{self._field}.{at}")
        self._sources |= piece.sources
        return piece.body

    def _grammar(self, text: str) -> str:
        name = f"tag-grammar-{len(self._grammars)}"
        self._grammars[name] = text
        return f"@{name}"

    def _term(self, text: str) -> str:
        """Return the term for a client's text, whose special tokens may be written as tokens or letter by letter."""
        parts = cut_at_tokens(text, self._token_ids)
        return literal(text) if len(parts) == 1 else f"({literal(text)} | {terms(parts, self._token_ids)})"

    def _text_to_token(self, text: str) -> str:
        """Return the term for free text followed by the client's ``text``, in which special tokens are tokens; "" if
        ``text`` has none. Free text ends before the first special token, since it cannot contain any."""
        first, *rest = cut_at_tokens(text, self._token_ids)
        if not rest:
            return ""
        lead = "TAG_TEXT"
        if first:
            lead = f"TAG_TEXT_{len(self._rules)}"
            self._rules.append(f"{lead}: {ANY_TEXT} {literal(first)}")
        return f"{lead} {terms(['', *rest], self._token_ids)}"

    def _rule(self, body: str) -> str:
        """Return the name of a lazy rule for ``body``; equal bodies share a rule."""
        rules = {rule.partition(": ")[2]: rule.partition("[")[0] for rule in self._rules[1:]}
        if body not in rules:
            rules[body] = f"tag_rule_{len(self._rules)}"
            self._rules.append(f"{rules[body]}[lazy]: {body}")
        return rules[body]

    def _value(self, one: Any, name: str, at: str) -> Any:
        if not isinstance(one, dict) or name not in one:
            raise self._wrong(f"{at}.{name}" if at else name, "it is needed")
        return one[name]

    def _string(self, one: Any, name: str, at: str, *, empty: bool = False) -> str:
        value = self._value(one, name, at)
        if not isinstance(value, str) or not (value or empty):
            raise self._wrong(f"{at}.{name}", "a text" if empty else "a text that is not empty")
        return value

    def _list(self, one: Any, name: str, at: str) -> Sequence[Any]:
        value = self._value(one, name, at)
        if not isinstance(value, list) or not 0 < len(value) <= MAX_TAGS:
            raise self._wrong(f"{at}.{name}" if at else name, f"a list of 1 to {MAX_TAGS}")
        return value

    def _wrong(self, at: str, reason: str) -> InvalidRequest:
        return InvalidRequest.of(FieldViolation(f"{self._field}.{at}", reason))
