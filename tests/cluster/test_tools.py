"""Tools and reasoning of small random models on real components, by the clients that people use."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import re
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import jsonschema
import openai
import pydantic
import pytest
import pytest_asyncio

from lab.testbed.conditions import until
from lab.testbed.tiny_model import save_model
from pillion import LLM, SamplingParams, Tool
from pillion.client.outputs import OutputCollector
from tests.support.components import Components, running_components

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = pathlib.Path(os.environ.get("PILLION_CLIENTS", ROOT / ".venv" / "clients"))
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}Tools:{% for tool in tools %}{{ tool.function.name }} {% endfor %}Write <tool_call>.{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)


class Forecast(pydantic.BaseModel):
    """Tells the weather."""

    city: str = pydantic.Field(max_length=8)
    days: int = pydantic.Field(ge=1, le=9)


TOOL: Any = openai.pydantic_function_tool(Forecast)
SCHEMA = TOOL["function"]["parameters"]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Bonn?"}],
    "tools": [TOOL],
    "max_tokens": 300,
    "seed": 5,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("tools") / "tiny", template=TEMPLATE, marks=MARKS)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def components(tiny: pathlib.Path) -> AsyncIterator[Components]:
    model = {"model": str(tiny), "dtype": "float32", "max_model_len": 1024}
    with tempfile.TemporaryDirectory(prefix="pil-") as name:
        async with running_components(pathlib.Path(name), model=model) as running:
            await until("the gateway to know the worker's model", running.client.models)
            yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


def url_of(components: Components) -> str:
    return f"http://{components.gateway.http_address}/v1"


def client_of(components: Components) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url_of(components), api_key="none", max_retries=0, timeout=60)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Forecast"}}])
async def test_random_weights_write_valid_calls(components: Components, choice: Any) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False, "n": 3}
    async with client_of(components) as client:
        whole = await client.chat.completions.parse(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
    for completion in (whole, streamed):
        for one in completion.choices:
            assert one.finish_reason == "tool_calls"
            assert one.message.content in (None, "")
            (call,) = one.message.tool_calls
            assert isinstance(call.function.parsed_arguments, Forecast)
    calls = [[one.message.tool_calls[0].function.arguments for one in each.choices] for each in (whole, streamed)]
    assert calls[0] == calls[1]
    await components.proven()


async def test_the_clients_and_the_offline_llm_agree(components: Components, tiny: pathlib.Path) -> None:
    tool = Tool(name="Forecast", parameters=json.dumps(SCHEMA), strict=True)
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": "Forecast"}
    collector = OutputCollector(None, None, False)
    async for delta in components.client.chat(ASKED["messages"], max_tokens=300, temperature=0, **asked):
        collector.add(delta)
    (answer,) = collector.output().outputs
    (call,) = answer.tool_calls
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert (answer.finish_reason, call.name, answer.text) == ("tool_calls", "Forecast", "")
    history = [*ASKED["messages"], {"role": "assistant", "content": None, "tool_calls": answer.tool_calls}]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    more = [delta async for delta in components.client.chat(history, max_tokens=2, **asked)]
    assert more[-1].finish_reason is not None

    def offline() -> Any:
        with LLM(str(tiny), dtype="float32", max_model_len=1024, kv_pool_bytes="64MiB") as llm:
            (output,) = llm.chat(
                ASKED["messages"], SamplingParams(max_tokens=300, temperature=0), use_tqdm=False, **asked
            )
            shaped = llm.generate(["Bonn", "Rome"], SamplingParams(max_tokens=300), schema=Forecast, use_tqdm=False)
            assert all(isinstance(one.outputs[0].parsed, Forecast) for one in shaped)
            return output.outputs[0]

    alone = await asyncio.to_thread(offline)
    assert [one.arguments for one in alone.tool_calls] == [call.arguments]
    await components.proven()


async def test_the_other_apis_return_the_tool_call(components: Components) -> None:
    address = f"http://{components.gateway.http_address}"
    to_message: Any = {"model": "tiny", "max_tokens": 300, "messages": ASKED["messages"]}
    tool: Any = {"name": "Forecast", "input_schema": SCHEMA, "strict": True}
    async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0, timeout=60) as client:
        asked = {**to_message, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        async with client.messages.stream(**asked, extra_body={"seed": 5}) as stream:
            final = await stream.get_final_message()
        (block,) = final.content
        assert (block.type, block.name, final.stop_reason) == ("tool_use", "Forecast", "tool_use")
        Forecast.model_validate(block.input)
        result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        history = [*to_message["messages"], {"role": "assistant", "content": final.content}]
        history.append({"role": "user", "content": [result]})
        again = await client.messages.create(**{**asked, "messages": history, "max_tokens": 2})
        assert again.stop_reason == "max_tokens"
    function: Any = {"type": "function", "name": "Forecast", "parameters": SCHEMA, "strict": True}
    async with client_of(components) as responses:
        response = await responses.responses.create(
            model="tiny",
            input="Bonn?",
            tools=[function],
            tool_choice={"type": "function", "name": "Forecast"},
            parallel_tool_calls=False,
            max_output_tokens=300,
        )
        (item,) = response.output
        assert (item.type, response.status) == ("function_call", "completed")
        Forecast.model_validate_json(item.arguments)
    await components.proven()


async def test_reasoning_comes_before_the_call(components: Components, tiny: pathlib.Path) -> None:
    from tokenizers import Tokenizer

    end = Tokenizer.from_file(str(tiny / "tokenizer.json")).token_to_id("</think>")
    body: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False}
    async with client_of(components) as client:
        cut = await client.chat.completions.create(**{**asked, "max_tokens": 7}, extra_body=body)
        assert cut.choices[0].finish_reason == "length"
        assert cut.usage.completion_tokens_details.reasoning_tokens == 7
        ended = await client.chat.completions.create(**asked, logit_bias={str(end): 100}, extra_body=body)
    assert ended.usage.completion_tokens_details.reasoning_tokens == 1
    (call,) = ended.choices[0].message.tool_calls
    Forecast.model_validate_json(call.function.arguments)
    await components.proven()


async def test_the_code_in_the_tools_documentation_runs(components: Components) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)
    for said, here in (("http://127.0.0.1:8000/v1", url_of(components)), ('model="demo"', 'model="tiny"')):
        assert said in code
        code = code.replace(said, here)
    known: dict[str, Any] = {}
    await asyncio.to_thread(exec, code, known)
    assert set(json.loads(known["call"].function.arguments)) >= {"city"}
    more = {**ASKED, "messages": known["messages"], "max_tokens": 1}
    async with client_of(components) as client:
        assert (await client.chat.completions.create(**more)).usage.completion_tokens == 1


@pytest.mark.long
@pytest.mark.skipif(not CLIENTS.is_dir(), reason="`make setup-clients` makes the environment of these clients")
async def test_langchain_parses_the_tool_calls(components: Components) -> None:
    """Other clients call tools in test_agents.py."""
    path = ROOT / "tests" / "clients" / "langchain_calls.py"
    process = await asyncio.create_subprocess_exec(
        str(CLIENTS / "bin" / "python"),
        str(path),
        url_of(components),
        "tiny",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "LANGSMITH_TRACING": "false"},
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    found = json.loads(out.decode().splitlines()[-1])
    assert {"whole", "streamed", "again"} <= set(found)
    for arguments in found.values():
        Forecast.model_validate(arguments)
    assert found["whole"] == found["streamed"]
    await components.proven()
