"""The caller's types become schemas, and answers become their values; jsonschema, msgspec and pydantic judge."""

from __future__ import annotations

import enum
import json
import pathlib
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest

from pillion import FinishReason, SamplingParams, StructuredOutputs
from pillion.client.answer_schema import ParsedAnswers, answer_schema, with_schema
from pillion.types import Delta


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Place(TypedDict):
    name: str
    at: NotRequired[tuple[float, float]]


@dataclass
class Leaf:
    kind: Literal["leaf"]
    size: float


@dataclass
class Tree:
    kind: Literal["tree"]
    children: list[Tree | Leaf]
    colour: Colour | None = None
    labels: dict[str, int] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    seen: bool = field(default=False, init=False)


class City(msgspec.Struct):
    name: str
    people: int | None = None


class Person(pydantic.BaseModel):
    name: str
    city: Literal["Paris", "Rome"] = "Rome"


TREE = {
    "kind": "tree",
    "children": [{"kind": "leaf", "size": 3}, {"kind": "tree", "children": []}],
    "colour": 2,
    "labels": {"a": 1},
    "places": [{"name": "x", "at": [1, 2.5]}, {"name": "y"}],
}
VALUES: list[tuple[Any, Any, Any, list[Any]]] = [
    (
        Tree,
        TREE,
        Tree(
            "tree",
            [Leaf("leaf", 3.0), Tree("tree", [])],
            Colour.BLUE,
            {"a": 1},
            ({"name": "x", "at": (1.0, 2.5)}, {"name": "y"}),
        ),
        [{**TREE, "seen": True}, {**TREE, "colour": 3}, {**TREE, "children": [{"kind": "leaf"}]}, {"kind": "tree"}],
    ),
    (Place, {"name": "x"}, {"name": "x"}, [{}, {"name": 1}, {"name": "x", "at": [1]}, {"name": "x", "to": 1}]),
    (City, {"name": "Rome", "people": 5}, City("Rome", 5), [{"people": 5}, {"name": "x", "y": 1}]),
    (Person, {"name": "Eve"}, Person(name="Eve"), [{"name": "Eve", "city": "Bonn"}, {"name": "Eve", "age": 3}]),
    (list[int], [1, 2], [1, 2], [[1.5], {}]),
    ({"type": "integer"}, 7, 7, ["7"]),
    ('{"enum": ["a", null]}', None, None, ["b"]),
]


@pytest.mark.parametrize(("kind", "good", "value", "bad"), VALUES)
def test_a_type_gives_a_schema_and_parses_its_values(kind: Any, good: Any, value: Any, bad: list[Any]) -> None:
    schema = answer_schema(kind)
    validator = jsonschema.Draft202012Validator(json.loads(schema.text))
    validator.check_schema(validator.schema)
    validator.validate(good)
    assert schema.parse(json.dumps(good)) == value
    assert [one for one in bad if validator.is_valid(one)] == []


def test_types_without_a_schema_are_rejected() -> None:
    for kind in (complex, set[int], dict[int, str], object):
        with pytest.raises(TypeError, match="no JSON schema"):
            answer_schema(kind)
    with pytest.raises(ValueError, match="Expecting"):
        answer_schema("{")
    with pytest.raises(TypeError, match="not both"):
        with_schema(SamplingParams(structured_outputs=StructuredOutputs(regex="a")), answer_schema(int))


def test_an_answer_that_was_cut_has_no_value() -> None:
    answers = ParsedAnswers(answer_schema(list[int]).parse)
    deltas = [
        answers.note(Delta("r", "[1,", index=0)),
        answers.note(Delta("r", "[3", finish_reason=FinishReason.LENGTH, index=1)),
        answers.note(Delta("r", "[", finish_reason=FinishReason.STOP, index=2, stop_string="x")),
        answers.note(Delta("r", " 2]", finish_reason=FinishReason.STOP, index=0)),
    ]
    assert [delta.parsed for delta in deltas] == [None, None, None, [1, 2]]


def test_the_sdk_imports_no_library_of_schemas() -> None:
    code = (
        "import sys, dataclasses, pillion\nfrom pillion.client.answer_schema import answer_schema\n"
        "answer_schema(dataclasses.make_dataclass('A', [('b', int)]))\n"
        "print(sorted({'msgspec', 'pydantic', 'llguidance'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TYPED = """
from dataclasses import dataclass
from typing import assert_type
from pillion import LLM, AsyncClient, Client

@dataclass
class City:
    capital: bool

async def read(client: Client, other: AsyncClient, llm: LLM) -> None:
    for delta in client.chat([], schema=City):
        assert_type(delta.parsed, City | None)
    for listed in client.generate("", schema=list[City]):
        assert_type(listed.parsed, list[City] | None)
    async for delta in other.chat([], schema=City):
        assert_type(delta.parsed, City | None)
    assert_type(llm.chat([], schema=City)[0].outputs[0].parsed, City | None)
    for result in client.batch([], schema=City):
        assert not isinstance(result, Exception)
        assert_type(result.outputs[0].parsed, City | None)
"""


@pytest.mark.long
def test_parsed_values_are_statically_typed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    words = ("mypy", "--strict", "--follow-imports=silent", f"--cache-dir={tmp_path}", tmp_path / "typed.py")
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
