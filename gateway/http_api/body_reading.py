"""Parsing and validation of bodies, with repairs of those that do not match their type although their meaning is clear.

body --> counted --> parsed as its type --> validated --> served
                      | mismatch
                      '--> repaired, level by level, by its types --> parsed again; a further error is the client's

A body is parsed in two steps, so that one that is too long is refused before it is parsed as a whole: first its strings
are counted, then lists and maps stay raw until each is counted.

A repair drops fields that the type does not have, and notes their names for a response header; it drops nulls, because
null means absent, and writes 4.0 as 4 for an integer. JSON that is passed on (Raw) is not changed. Each level of a type
parses the text below it once, and a type has few levels. The number of strings, checked first, bounds the objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from pillion.gateway.http_api.http_errors import ApiError, refused
from pillion.gateway.http_api.json_objects import IGNORED, OTHER
from pillion.gateway.http_api.openai_fields import (
    EMPTY_VALUES,
    FALSE_MATTERS,
    HARMLESS,
    INSTEAD,
    READ_AS,
    READ_LATER,
    SAME_FIELDS,
)
from pillion.gateway.http_api.structure_fields import CARRIERS, OTHER_SPELLINGS
from pillion.gateway.request.validation import (
    MAX_BRACKETS,
    MAX_STRINGS,
    holds_too_many_brackets,
    holds_too_many_strings,
)
from pillion.gateway.tokens.tokenizer import check_wanted

T = TypeVar("T")

# Response header that names the request's fields without effect, without list indexes.
IGNORED_HEADER = "x-pillion-ignored"
MAX_IGNORED_NAMES = 64
MAX_IGNORED_NAME_CHARS = 128
MAX_IGNORED_HEADER_BYTES = 2048
MORE_IGNORED = "..."
UNKNOWN = "this field is not known here"
REQUIRED = "this field is required"
_MAX_EXACT_INTEGER = 2**53
# Characters of both ends of the parser's message to show; what it has in between is the client's own text.
_MAX_ERROR_CHARS = 1000
_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_NAMED = re.compile(r"field `([^`]*)`")
_VALUE = re.compile(r"^Invalid (?:enum )?value '(.*)'$", re.DOTALL)
# Max surrogate escapes per body (131,072 emoji); above it, unpaired ones are not replaced.
MAX_SURROGATES = 2**18
_INDEX = re.compile(r"\[\d+\]")
# Not allowed in names in the header; a comma or a space would look like a name's end.
_UNPRINTABLE = re.compile(r"[^!-+\--~]")
_SURROGATES = re.compile(rb"\\u[dD](?:([89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F])|[89a-fA-F])[0-9a-fA-F]{2}")
_ITEM = re.compile(r"\[\d+\](?=`$)")
_object_in = msgspec.json.Decoder(dict[str, Raw]).decode
_objects_in = msgspec.json.Decoder(list[dict[str, Raw] | str]).decode
# The number of strings bounds that of nonempty objects, so in a body with more objects, empty ones are refused.
_named_objects_in = msgspec.json.Decoder(list[Annotated[dict[str, Raw], msgspec.Meta(min_length=1)] | str]).decode


@dataclass(slots=True)
class BodyReading:
    """Options of the parsing of one body, and the fields without effect that it met.

    Attributes:
        strict: whether undocumented fields are refused.
        names: names of the body's fields without effect (keys), at most MAX_IGNORED_NAMES.
        truncated: whether there are more such fields than ``names``.
    """

    strict: bool = False
    names: dict[str, None] = field(default_factory=dict)
    truncated: bool = False

    @property
    def ignored(self) -> str:
        """Value of the header with the fields without effect."""
        text = ", ".join(sorted(self.names))
        cut = text[:MAX_IGNORED_HEADER_BYTES].rpartition(", ")[0] if len(text) > MAX_IGNORED_HEADER_BYTES else text
        return f"{cut}, {MORE_IGNORED}" if self.truncated or cut != text else cut

    def note(self, name: str) -> None:
        """Record a field without effect. List indexes in its path ``name`` are removed."""
        shown = _INDEX.sub("", name[: 2 * MAX_IGNORED_NAME_CHARS])
        if len(shown) > MAX_IGNORED_NAME_CHARS:
            shown = shown[:MAX_IGNORED_NAME_CHARS] + MORE_IGNORED
        shown = _UNPRINTABLE.sub("?", shown)
        if len(self.names) < MAX_IGNORED_NAMES:
            self.names[shown] = None
        elif shown not in self.names:
            self.truncated = True


_reading: ContextVar[BodyReading | None] = ContextVar("reading", default=None)


def current_reading() -> BodyReading:
    """Return the active reading (:func:`with_reading`). Without one there is no header, so undocumented fields are
    refused."""
    return _reading.get() or BodyReading(strict=True)


def note_ignored(name: str) -> None:
    """Record a field without effect in the active reading."""
    current_reading().note(name)


def with_reading(reading: BodyReading, read: Callable[..., T], *arguments: Any) -> T:
    """Parse a body with ``reading`` active: return ``read(*arguments)``."""
    before = _reading.set(reading)
    try:
        return read(*arguments)
    finally:
        _reading.reset(before)


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a body as the struct ``kind``; its fields of type Raw stay unparsed. Raises ApiError, naming the field."""
    if holds_too_many_strings(body):
        raise _too_many(kind, f"{MAX_STRINGS} strings, names of fields included")
    if holds_too_many_brackets(body):
        raise _too_many(kind, f"{MAX_BRACKETS} brackets and braces")
    parsed: T = parse_field(replace_unpaired_surrogates(body), READ_AS.get(kind, kind), "")
    for name, json_name in _required_fields(kind):  # type: ignore[arg-type]
        value = getattr(parsed, name)
        if isinstance(value, Raw) and not given(value):
            raise refused(json_name, REQUIRED, "missing_required_parameter")
    return parsed


def _too_many(kind: Any, what: str) -> ApiError:
    """Return the error of a body with too many strings or brackets, naming the only list that can be so long."""
    names = {field.name for field in msgspec.structs.fields(kind)}
    lists = ("messages", "input", "prompt", "tokens", "documents", "text_2", "lora_name")
    return refused(next(name for name in lists if name in names), f"the body has more than {what}")


def parse_field(raw: bytes | Raw, kind: Any, field: str) -> Any:
    """Parse a raw field of a body, or with the name "" the body itself, as ``kind``, repaired if necessary. Raises
    ApiError."""
    try:
        try:
            parsed = msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            parsed = msgspec.json.decode(repaired(raw, kind, field), type=kind)
    except (ValueError, RecursionError) as error:
        raise _parse_error(error, field) from None
    _validate(parsed, field)
    return parsed


def given(raw: Raw) -> bool:
    """Return True if a raw field is present and not null."""
    return memoryview(raw)[:5].tobytes() not in (b"", b"null")


def _validate(parsed: Any, path: str) -> None:
    """Raise ApiError for unsupported fields of ``parsed``, at ``path``, and of its objects; record those without
    effect."""
    if isinstance(parsed, list) and parsed and isinstance(parsed[0], msgspec.Struct):
        for n, one in enumerate(parsed):
            check_wanted()
            _validate(one, f"{path}[{n}]")
    if not isinstance(parsed, msgspec.Struct):
        return
    kind: Any = type(parsed)
    prefix = f"{path}." if path else ""
    for name, attribute in unsupported_fields(kind).items():
        raw = getattr(parsed, attribute)
        if given(raw) and not _changes_nothing(name, raw):
            raise _unsupported(prefix, name)
    for name, json_name in _ignored_fields(kind):
        value = getattr(parsed, name)
        if not value and name not in FALSE_MATTERS:
            continue
        if isinstance(value, Raw):
            has_value = given(value) and not _changes_nothing(name, value)
        else:
            has_value = value is not None and value not in harmless_values(name)
        if has_value:
            note_ignored(prefix + json_name)
    for name in _nested_fields(kind):
        inner = getattr(parsed, name)
        if isinstance(inner, list | msgspec.Struct):
            _validate(inner, prefix + name)


def _unsupported(prefix: str, name: str) -> ApiError:
    harmless = b" or ".join(map(msgspec.json.encode, HARMLESS.get(name, ()))).decode()
    reason = "this is not supported here" + (f", only {harmless} is" if harmless else "")
    return refused(prefix + name, INSTEAD.get(name, reason), "unsupported_parameter")


def _changes_nothing(name: str, raw: Raw) -> bool:
    # All values in HARMLESS are shorter.
    if len(bytes(raw)) > 64:
        return False
    try:
        parsed = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return False
    return any(type(parsed) is type(value) and parsed == value for value in harmless_values(name))


def harmless_values(name: str) -> tuple[Any, ...]:
    """Return the values that request the default behavior, of a field that is unsupported or without effect."""
    return (*HARMLESS.get(name, ()), *(() if name in FALSE_MATTERS else EMPTY_VALUES))


@cache
def unsupported_fields(kind: type[Any]) -> Mapping[str, str]:
    """Return the fields of a struct that are parsed only to be refused: name in JSON -> attribute. Their values are
    raw JSON."""
    raw = (f for f in msgspec.structs.fields(kind) if f.type is Raw and f.name not in READ_LATER)
    return {f.encode_name: f.name for f in raw}


@cache
def _required_fields(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return a struct's required fields: (attribute, name in JSON)."""
    return tuple((f.name, f.encode_name) for f in msgspec.structs.fields(kind) if f.required)


@cache
def _ignored_fields(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    """Return a struct's fields without effect: (attribute, name in JSON)."""
    return tuple((f.name, f.encode_name) for f in msgspec.structs.fields(kind) if is_ignored(f))


def is_ignored(field: msgspec.structs.FieldInfo) -> bool:
    """Return True if a field of a struct is accepted without effect."""
    return IGNORED in getattr(field.type, "__metadata__", ())


@cache
def _nested_fields(kind: type[Any]) -> tuple[str, ...]:
    """Return the attributes of a struct that may contain structs."""
    return tuple(f.name for f in msgspec.inspect.type_info(kind).fields if _holds_structs(f.type))  # type: ignore[attr-defined]


def _holds_structs(kind: msgspec.inspect.Type) -> bool:
    match kind:
        case msgspec.inspect.StructType():
            return True
        case msgspec.inspect.UnionType():
            return any(map(_holds_structs, kind.types))
        case msgspec.inspect.ListType():
            return _holds_structs(kind.item_type)
    return False


def _parse_error(error: Exception, field: str) -> ApiError:
    """Convert a parser's exception to an ApiError that names the field; msgspec's message has its path."""
    if isinstance(error, UnicodeDecodeError):
        return ApiError(400, "the body is not valid UTF-8", param=field or None, code="invalid_json")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", param=field or None, code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {error}", param=field or None, code="invalid_json")
    text = str(error)
    if len(text) > 2 * _MAX_ERROR_CHARS:
        text = text[:_MAX_ERROR_CHARS] + text[-_MAX_ERROR_CHARS:]
    located = _PATH.match(text)
    what, path = (located["what"], located["path"] or "") if located else (text, "")
    named = _NAMED.search(what)
    if named:
        path = f"{path}.{named[1]}" if path else named[1]
    joint = "" if not path or not field or path.startswith("[") else "."
    param = field + joint + path
    if "unknown field" in what:
        return refused(param, UNKNOWN, "unknown_parameter")
    if "missing required" in what:
        return refused(param, REQUIRED, "missing_required_parameter")
    if param.endswith("type") and (unknown := _VALUE.search(what)):
        reason = INSTEAD.get(unknown[1], f"{unknown[1]!r} is not supported here")
        return refused(param, reason, "unsupported_value")
    return refused(param, what, "invalid_type") if param else ApiError(400, what, code="invalid_type")


def replace_unpaired_surrogates(body: bytes) -> bytes:
    """Replace unpaired surrogate escapes with U+FFFD, as other servers do, if there are at most MAX_SURROGATES."""
    escapes = body.count(b"\\ud") + body.count(b"\\uD")
    return _replace_unpaired(body) if 0 < escapes <= MAX_SURROGATES else body


def _replace_unpaired(body: bytes) -> bytes:
    result, done = bytearray(body), 0
    for match in _SURROGATES.finditer(body):
        before = body[done : match.start()]
        # After an odd number of backslashes the match is no escape, so its second half is unpaired.
        escaped = (len(before) - len(before.rstrip(b"\\"))) % 2
        if bool(match[1]) == bool(escaped):
            half = match.start() + 6 * escaped
            result[half : half + 6] = b"\\ufffd"
        done = match.end()
    return bytes(result)


def repaired(raw: bytes | Raw, kind: Any, path: str) -> bytes:
    """Return the JSON ``raw`` of a body, or of its field ``path``, repaired to match the type ``kind``.

    Raises ApiError for a field at the top that is a near miss of a known one, and msgspec's errors for invalid JSON.
    """
    text = bytes(raw).lstrip()
    result = _repair(text, _shape(kind), path, current_reading())
    return text if result is text else msgspec.json.encode(result)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a repair needs to know about a field's type.

    Attributes:
        structs: accepted structs by tag; "" for one without a tag.
        tag_field: name of the field with the tag.
        items: shape of a list's items; None if lists are not accepted, or their items cannot be repaired.
        integer: whether integers are accepted, but no fractions.
    """

    structs: Mapping[str, type[Any]]
    tag_field: str = ""
    items: _Shape | None = None
    integer: bool = False

    @property
    def unrepairable(self) -> bool:
        """True if no repair is possible."""
        return not (self.structs or self.items or self.integer)


@cache
def _shape(kind: Any) -> _Shape:
    return _shape_of(msgspec.inspect.type_info(kind))


def _shape_of(info: msgspec.inspect.Type) -> _Shape:
    kinds = [info]
    if isinstance(info, msgspec.inspect.UnionType):
        kinds = list(info.types)
    structs: dict[str, type[Any]] = {}
    tag_field, items = "", None
    integer = fraction = False
    for kind in kinds:
        while isinstance(kind, msgspec.inspect.Metadata):
            kind = kind.type
        match kind:
            case msgspec.inspect.StructType():
                structs[str(kind.tag or "")] = kind.cls
                tag_field = kind.tag_field or tag_field
            case msgspec.inspect.ListType():
                inner = _shape_of(kind.item_type)
                items = None if inner.unrepairable else inner
            case msgspec.inspect.IntType():
                integer = True
            case msgspec.inspect.FloatType():
                fraction = True
    return _Shape(structs, tag_field, items, integer and not fraction)


@cache
def _fields(kind: type[Any]) -> Mapping[str, _Shape]:
    """Return the shapes of a struct's fields, by their names in JSON."""
    return {one.encode_name: _shape_of(one.type) for one in msgspec.inspect.type_info(kind).fields}  # type: ignore[attr-defined]


def _repair(raw: Any, shape: _Shape, path: str, reading: BodyReading) -> Any:
    """Return an object that encodes as the repaired JSON, or ``raw`` itself if nothing was repaired."""
    first = memoryview(raw)[:1].tobytes() if not shape.unrepairable else b""
    if first == b"{" and shape.structs:
        return _repair_object(_object_in(raw), shape, path, reading)
    if first == b"[" and shape.items is not None:
        return _repair_list(raw, shape.items, path, reading)
    if shape.integer and (first == b"-" or first.isdigit()):
        return _repair_integer(raw)
    return raw


def _repair_list(raw: Any, items: _Shape, path: str, reading: BodyReading) -> Any:
    if not items.structs:
        try:
            numbers = msgspec.json.decode(raw, type=list[float]) if items.integer else ()
        except msgspec.ValidationError:
            # An item is not a number. Leave the list as it is: parsing the repaired body again reports which item.
            return raw
        exact = all(number.is_integer() and abs(number) <= _MAX_EXACT_INTEGER for number in numbers)
        return list(map(int, numbers)) if numbers and exact else raw
    read = _objects_in if bytes(raw).count(b"{") <= MAX_STRINGS else _named_objects_in
    try:
        objects = read(raw)
    except msgspec.ValidationError as error:
        index = _ITEM.search(str(error))
        raise refused(path + (index[0] if index else ""), "expected an object", "invalid_type") from None
    return [
        one if isinstance(one, str) else _repair_object(one, items, f"{path}[{n}]", reading)
        for n, one in enumerate(objects)
    ]


def _repair_object(sent: dict[str, Raw], shape: _Shape, path: str, reading: BodyReading) -> Any:
    """Return an object that encodes as the repaired JSON of ``sent``, an object of one of the structs in ``shape``."""
    check_wanted()
    tag = _text(sent[shape.tag_field]) if shape.tag_field in sent else ""
    if tag not in shape.structs and OTHER in shape.structs:
        fields = _fields(shape.structs[OTHER])  # type: ignore[arg-type]
        kept = {name: _repair(value, fields[name], path, reading) for name, value in sent.items() if name in fields}
        return {**_without_nulls(kept), "sent_type": tag, shape.tag_field: OTHER}
    only = next(iter(shape.structs.values())) if len(shape.structs) == 1 and not tag else None
    kind = shape.structs.get(tag) or shape.structs.get("") or only
    if kind is None:
        return sent
    known, result = _fields(kind), dict[str, Any]()  # type: ignore[arg-type]
    is_server_side = getattr(kind, "is_server_side", None)
    drops_unknown = is_server_side is not None and is_server_side(sent)
    if "structured_outputs" in known:
        sent = _with_own_names(sent, known)
    for name, value in sent.items():
        where = f"{path}.{name}" if path else name
        if name in known:
            result[name] = _repair(value, known[name], where, reading)
        elif name == shape.tag_field:
            result[name] = value
        elif not (drops_unknown or _is_null(value)):
            if not path:
                _refuse_near_miss(name, known, reading)
                if "structured_outputs" in known:
                    _refuse_structure(name, value)
            if reading.strict:
                raise refused(where, UNKNOWN, "unknown_parameter")
            reading.note(where)
    return _without_nulls(result)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not _is_null(value)}


def _is_null(value: Any) -> bool:
    return isinstance(value, Raw) and memoryview(value)[:5].tobytes() == b"null"


def _text(raw: Raw) -> str:
    try:
        return str(msgspec.json.decode(raw, type=str))
    except msgspec.ValidationError:
        return ""


def _repair_integer(raw: Any) -> Any:
    """Return a JSON number as an int if it has no fraction, e.g. 4.0, else ``raw``."""
    text = bytes(raw)
    # An integer up to _MAX_EXACT_INTEGER has fewer characters, unless it is padded with zeros.
    if len(text) > 32 or text.lstrip(b"-").isdigit():
        return raw
    number = float(text)
    return int(number) if number.is_integer() and abs(number) <= _MAX_EXACT_INTEGER else raw


def _refuse_near_miss(name: str, known: Mapping[str, Any], reading: BodyReading) -> None:
    """Raise ApiError for an unknown name that is one edit away from a known one. Names beyond the header's limits are
    not compared, which bounds the work."""
    # Shorter names are too often near by chance.
    if 8 <= len(name) <= MAX_IGNORED_NAME_CHARS and not reading.truncated:
        near = next((one for one in known if is_one_edit(name, one)), None)
        if near is not None:
            raise refused(name, f"did you mean {near}?", "unknown_parameter")


def _with_own_names(sent: dict[str, Raw], known: Mapping[str, Any]) -> dict[str, Raw]:
    """Rename fields that another API names differently (SAME_FIELDS) to the body's names, which are in ``known``."""
    renamed: dict[str, str] = {}
    for names in SAME_FIELDS:
        own = next((name for name in names if name in known), "")
        other = next((name for name in names if name in sent and name not in known), "")
        if own and other and own not in sent:
            renamed[other] = own
    return {renamed.get(name, name): value for name, value in sent.items()} if renamed else sent


def _refuse_structure(name: str, value: Raw) -> None:
    """Raise ApiError for an unknown field that requests a structure or contains such a field, since ignoring it would
    change the answer."""
    normalized = _normalized(name)
    fields = {name: value}
    if normalized in CARRIERS and bytes(value)[:1] == b"{":
        fields = {f"{name}.{inner}": nested for inner, nested in _object_in(value).items()}
    for path, sent in fields.items():
        asks = bytes(sent) not in (b"null", b"false", b'""', b"[]", b"{}")
        if asks and _normalized(path.rpartition(".")[2]) in OTHER_SPELLINGS:
            text = "this name of the answer's structure is unknown here; send response_format, at the top of the body"
            raise refused(path[: 2 * MAX_IGNORED_NAME_CHARS], text, "unknown_parameter")


def _normalized(name: str) -> str:
    return name[:MAX_IGNORED_NAME_CHARS].lower().replace("_", "").replace("-", "")


def is_one_edit(name: str, other: str) -> bool:
    """Return True if the names differ by one letter inserted, removed or replaced, or by two neighbors swapped."""
    if abs(len(name) - len(other)) > 1 or name == other:
        return False
    common = next((n for n, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), min(len(name), len(other)))
    rest, other_rest = name[common:], other[common:]
    swapped = rest[1:2] + rest[:1] + rest[2:]
    return rest[1:] == other_rest[1:] or rest[1:] == other_rest or rest == other_rest[1:] or swapped == other_rest
