"""Two real gateway processes behind one pair of ports: both serve, one may die, quotas hold over both, none loses a
stream when they get a signal to end, and a batch is finished once whoever is killed."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import anthropic
import grpc
import openai
import psutil
import pydantic
import pytest
import redis

from lab.testbed.cluster import STOP_TIMEOUT_S, ServedCluster, alive, served, words_of
from lab.testbed.conditions import WITHIN_S, wait_for
from lab.testbed.defaults import GATEWAY, Defaults
from lab.testbed.ports import free_port
from lab.testbed.tiny_model import save_model
from pillion import Client, Delta, StructuredOutputs
from pillion.client.outputs import OutputCollector, RequestOutput
from pillion.gateway.admission.api_keys import hash_of
from pillion.gateway.batches.batch_folder import BatchFolder
from pillion.kvstore.index import redis_keys
from pillion.v1 import gateway_pb2, gateway_pb2_grpc
from tests.support.batch_checks import check_batches
from tests.support.http import Reply, parse_reply, request_bytes

pytestmark = pytest.mark.cluster

KEYS = {name: f"plk-{name}-" + name[0] * 40 for name in ("free", "bound", "late", "once")}
TENANTS = "[tenant.free]\noperator = true\n[tenant.bound]\nrequests_per_minute = 12\n[tenant.late]\n"
TENANTS += "[tenant.once]\nrequests_per_minute = 1\n"
FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-pool-bytes", "64MiB", "--gateway-workers", "2")
FLAGS += ("--drain-timeout-s", "300")
HTTP_PORT = free_port()
STREAMS, GRPC_STREAMS, TOKENS = 8, 4, 300
# Lines of a batch, lines in flight, and steps of their answers: every other one is long. A new line begins when another
# is done, so at this submit eight are.
LINES, LINES_AT_ONCE, STEPS = 60, 16, {0: 40, 1: 250}
HELD_AT_SUBMIT = LINES_AT_ONCE + 8
LINES_LIMIT: Defaults = {GATEWAY: {"max_batch_requests": LINES_AT_ONCE}}
STEPS_BETWEEN_LOOKS = 5
# Message of an answer, from 0, after which the SDK is to resume it.
AMID = 2
# Words of an answer of some 250 tokens (bytes).
WORDS = 3
_ARRAY = {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{80}$"}, "minItems": WORDS, "maxItems": WORDS}
LONG = {"type": "object", "properties": {"w": _ARRAY}, "required": ["w"], "additionalProperties": False}
LONG_SHAPE = StructuredOutputs(json=json.dumps(LONG))
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France, and what of Italy?"}]


class Sky(pydantic.BaseModel, extra="forbid"):
    """What answers are to say."""

    degrees: int = pydantic.Field(ge=-99, le=99)
    rain: bool


WEATHER: Any = {"type": "json_schema", "name": "w", "schema": Sky.model_json_schema()}


def keys_toml(*names: str) -> str:
    return TENANTS + "".join(f'[[key]]\ntenant = "{name}"\nhash = "{hash_of(KEYS[name])}"\n' for name in names)


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(keys_toml("free", "bound", "once"))
    return path


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, keys_file: pathlib.Path, batches: pathlib.Path
) -> Iterator[ServedCluster]:
    model = str(save_model(tmp_path_factory.mktemp("model") / "tiny"))
    flags = (*FLAGS, "--api-keys", str(keys_file), "--http-port", str(HTTP_PORT), "--batch-path", str(batches))
    with pytest.MonkeyPatch.context() as environ, tempfile.TemporaryDirectory(prefix="pil-") as folder:
        environ.setenv("PILLION_API_KEY", KEYS["free"])
        with served(pathlib.Path(folder), model, *flags, faults=True, defaults=LINES_LIMIT) as running:
            wait_for("both gateways to listen", lambda: both_listen(running))
            yield running


def gateways(cluster: ServedCluster) -> dict[str, psutil.Process]:
    """Return the living gateway processes by component id."""
    found = {}
    for process in cluster.processes():
        words = words_of(process)
        if "gateway" in words[:4]:
            found[next(word for word in words if word.startswith("--component-id=")).partition("=")[2]] = process
    return found


def ask(cluster: ServedCluster, body: object, key: str = KEYS["free"], path: str = "/tokenize") -> tuple[int, Reply]:
    """Send a request on a connection of its own; return the answering process by the kernel, and the reply."""
    with socket.create_connection(("127.0.0.1", HTTP_PORT), timeout=WITHIN_S) as connection:
        # Read first: the reply closes the connection.
        pid = owner(cluster, connection)
        connection.sendall(request_bytes("POST", path, body, {"Authorization": f"Bearer {key}"}))
        received = b""
        while chunk := connection.recv(2**16):
            received += chunk
    return pid, parse_reply(received)


def owner(cluster: ServedCluster, connection: socket.socket) -> int:
    """Return the gateway process that accepted a connection."""
    own = connection.getsockname()[1]

    def accepted() -> int:
        return next((one.pid for one in gateways(cluster).values() if own in peers(one)), 0)

    return int(wait_for("the connection to be accepted", accepted))


def peers(process: psutil.Process) -> set[int]:
    return {one.raddr.port for one in process.net_connections("tcp") if one.raddr}


def listeners() -> list[Any]:
    """Return the sockets that listen on the HTTP port, each with its living process."""
    found = psutil.net_connections("tcp")
    return [one for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == HTTP_PORT]


def both_listen(cluster: ServedCluster) -> bool:
    """Return whether two gateway processes live and connections reach each of them."""
    pids = {process.pid for process in gateways(cluster).values()}
    return len(pids) == 2 and {one.pid for one in listeners()} == pids


def test_both_processes_serve_both_ports(cluster: ServedCluster) -> None:
    pids = {process.pid for process in gateways(cluster).values()}
    assert set(gateways(cluster)) == {"gateway-0", "gateway-1"}
    # The kernel picks a process per connection: all of one only once in 500 billion runs.
    answered = [ask(cluster, {"prompt": "x"}) for _ in range(40)]
    assert {pid for pid, _ in answered} == pids
    assert {reply.status for _, reply in answered} == {200}
    # gRPC shares connections between channels by default.
    channels = [
        grpc.insecure_channel(cluster.target, [("grpc.use_local_subchannel_pool", 1), ("number", n)]) for n in range(40)
    ]
    metadata = (("authorization", f"Bearer {KEYS['free']}"),)
    for channel in channels:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        assert [model.name for model in stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata).models]
    port = int(cluster.target.rpartition(":")[2])
    taken = {
        process.pid
        for process in gateways(cluster).values()
        for one in process.net_connections("tcp")
        if one.laddr.port == port and one.raddr
    }
    assert taken == pids
    for channel in channels:
        channel.close()


def test_status_sums_both_gateway_processes(cluster: ServedCluster) -> None:
    with Client(cluster.target) as client:
        before = client.status().prompt_tokens
        for _ in range(12):
            body = {"model": "tiny", "prompt": list(range(2, 12)), "max_tokens": 1, "temperature": 0}
            assert ask(cluster, body, path="/v1/completions")[1].status == 200
        wait_for("all prompts in the totals", lambda: client.status().prompt_tokens == before + 120)
        assert sorted(
            component.component_id for component in client.status().components if component.role == "gateway"
        ) == [
            "gateway-0",
            "gateway-1",
        ]


def test_a_quota_covers_both_apis(cluster: ServedCluster) -> None:
    """A quota of 12 in a minute admits 12 requests, not 24, and one more for each 5 s that the test takes."""
    begun_s = time.monotonic()
    replies = [ask(cluster, {"prompt": "x"}, KEYS["bound"]) for _ in range(40)]
    allowed = [pid for pid, reply in replies if reply.status == 200]
    assert 12 <= len(allowed) <= 14 + (time.monotonic() - begun_s) / 5
    assert len({pid for pid, _ in replies}) == 2
    refused = next(reply for _, reply in replies if reply.status == 429)
    assert refused.error["message"].startswith(
        "requests_per_minute of tenant 'bound' (12) is used up. Please try again in"
    )
    assert 0 < int(refused.headers["retry-after-ms"]) <= 5000


def test_both_processes_reload_keys(cluster: ServedCluster, keys_file: pathlib.Path) -> None:
    assert ask(cluster, {"prompt": "x"}, KEYS["late"])[1].status == 401
    keys_file.write_text(keys_toml("free", "bound", "once", "late"))

    def known() -> bool:
        return all(ask(cluster, {"prompt": "x"}, KEYS["late"])[1].status == 200 for _ in range(8))

    wait_for("the key in every process", known)


def api_clients(key: str) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    url = f"http://127.0.0.1:{HTTP_PORT}"
    usual: Any = {"api_key": KEYS[key], "max_retries": 0, "timeout": 100}
    return openai.OpenAI(base_url=f"{url}/v1", **usual), anthropic.Anthropic(base_url=url, **usual)


def test_the_other_apis_answer_their_clients(cluster: ServedCluster) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 5, "messages": MESSAGES}
    to_respond: Any = {"model": "tiny", "max_output_tokens": 100, "input": MESSAGES}
    responses, messages = api_clients("free")
    with responses, messages:
        parsed = responses.responses.parse(**to_respond, text_format=Sky)
        assert isinstance(parsed.output_parsed, Sky)
        with responses.responses.stream(**to_respond, text_format=Sky) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Sky)
        with messages.messages.stream(**asked, extra_body={"temperature": 0}) as spoken:
            text = "".join(spoken.text_stream)
            final = spoken.get_final_message()
        assert "".join(block.text for block in final.content if block.type == "text") == text
        assert final.usage.output_tokens == 5
        prompt_tokens = messages.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
        assert prompt_tokens > 64

        def cached(salt: str) -> tuple[int, int]:
            """Return how many tokens of the prompt each API finds."""
            extra = {"cache_salt": salt}
            message = messages.messages.create(**asked, extra_body=extra)
            response = responses.responses.create(**{**to_respond, "max_output_tokens": 5}, extra_body=extra)
            assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == prompt_tokens
            assert response.usage is not None
            return message.usage.cache_read_input_tokens or 0, response.usage.input_tokens_details.cached_tokens

        first, second = cached("one")
        assert (first, second > 48) == (0, True)
        assert cached("one") == (second, second)
        assert cached("two")[0] == 0


def test_tenants_and_quotas_apply_to_the_other_apis(cluster: ServedCluster) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 1, "messages": MESSAGES, "extra_body": {"cache_salt": "one"}}
    responses, messages = api_clients("once")
    with responses, messages:
        assert messages.messages.create(**asked).usage.cache_read_input_tokens == 0
        with pytest.raises(anthropic.RateLimitError) as refused:
            messages.messages.create(**asked)
        assert refused.value.body["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError, match="requests_per_minute of tenant 'once'"):
            responses.responses.create(model="tiny", input="x")
        with pytest.raises(openai.RateLimitError):
            responses.chat.completions.create(model="tiny", messages=MESSAGES)
    other, anthropics = api_clients("late")
    with other, anthropics, pytest.raises(anthropic.AuthenticationError):
        anthropics.with_options(api_key="wrong").messages.create(**asked)


def test_batches_accept_lines_of_every_api(cluster: ServedCluster) -> None:
    chat = {"model": "tiny", "max_tokens": 100, "messages": MESSAGES}
    shape = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER["schema"]}}
    response = {"model": "tiny", "max_output_tokens": 100, "input": "Rome?", "text": {"format": WEATHER}}
    wrong = {**response, "text": {"format": {**WEATHER, "schema": {"not": {}}}}}
    bodies: dict[Any, list[Any]] = {
        "/v1/responses": [response, wrong],
        "/v1/chat/completions": [chat | {"response_format": shape, "seed": n} for n in range(2)],
    }
    client, _ = api_clients("free")
    with client:
        for url, asked in bodies.items():
            lines = [{"custom_id": f"c{n}", "method": "POST", "url": url, "body": body} for n, body in enumerate(asked)]
            content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
            wait_for(
                "the batch to end",
                lambda name=batch.id: client.batches.retrieve(name).status == "completed",
                100,
            )
            batch = client.batches.retrieve(batch.id)
            answers = client.files.content(str(batch.output_file_id)).text.splitlines()
            texts = []
            for answer in (json.loads(line)["response"]["body"] for line in answers):
                if url == "/v1/responses":
                    texts += [part["text"] for item in answer["output"] for part in item["content"]]
                else:
                    texts += [choice["message"]["content"] for choice in answer["choices"]]
            assert [Sky.model_validate_json(text) for text in texts]
            assert len(texts) == sum(body is not wrong for body in asked)
            if wrong in asked:
                (failed,) = client.files.content(str(batch.error_file_id)).text.splitlines()
                error = json.loads(failed)["response"]
                assert (error["status_code"], error["body"]["error"]["param"]) == (400, "text.format.schema")


def test_the_cli_prints_output_that_matches_a_schema(cluster: ServedCluster, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "schema.json"

    def generate(schema: Any) -> subprocess.CompletedProcess[str]:
        path.write_text(json.dumps(schema))
        words = ["generate", "--target", cluster.target, "--schema", str(path), "--max-tokens", "100", "Rome?"]
        return subprocess.run([sys.executable, "-m", "pillion", *words], capture_output=True, text=True, timeout=100)

    printed = generate(Sky.model_json_schema())
    assert printed.returncode == 0, printed.stderr
    Sky.model_validate_json(printed.stdout)
    refused = generate({"properties": {"a": {"not": {"const": 1}}}})
    assert refused.returncode != 0
    assert "/properties/a/not" in refused.stderr


def told_loads(cluster: ServedCluster) -> list[bytes]:
    """Return the gateways that have reported their load to the others."""
    with redis.Redis(unix_socket_path=str(next(cluster.folder.rglob("redis*.sock")))) as client:
        return list(client.scan_iter(redis_keys.load_key("*")))


def test_streams_of_a_killed_gateway_process_resume_on_the_other(cluster: ServedCluster) -> None:
    """The SDK resumes them after their last tokens: answers, log probabilities and usage are those of an undisturbed
    run, also of several answers to a prompt."""
    texts, port = [f"Once {n}" for n in range(STREAMS)], int(cluster.target.rpartition(":")[2])

    def read(client: Client, number: int, salt: str, begun: threading.Semaphore) -> RequestOutput:
        more: dict[str, Any] = {"n": 3, "logprobs": 2} if number % 2 else {}
        if number % 4 > 1:
            # The stream breaks within an object.
            more |= {"structured_outputs": LONG_SHAPE}
        fields = {"seed": number, "max_tokens": TOKENS, "ignore_eos": True, "cache_salt": salt, **more}
        collector = OutputCollector(None, None, True)
        for count, delta in enumerate(client.generate(texts[number], request_id=f"r-{number}", **fields)):
            collector.add(delta)
            if count == AMID:
                begun.release()
        return collector.output()

    with Client(cluster.target) as client, ThreadPoolExecutor(STREAMS) as pool:
        begun = threading.Semaphore(0)
        wanted = [pool.submit(read, client, n, "undisturbed", begun) for n in range(STREAMS)]
        wanted = [replace(work.result(300), timings=None) for work in wanted]
        begun = threading.Semaphore(0)
        cluster.arm(STEPS_BETWEEN_LOOKS, signal.SIGSTOP)
        reading = [pool.submit(read, client, n, "disturbed", begun) for n in range(STREAMS)]
        with cluster.holding_all("all streams", lambda: begun._value == STREAMS, STEPS_BETWEEN_LOOKS):
            wait_for("the gateway to tell the other one what it has under way", lambda: told_loads(cluster))
            connections = psutil.Process().net_connections("tcp")
            own = {one.laddr.port for one in connections if one.raddr and one.raddr.port == port}
            killed = [process for process in gateways(cluster).values() if own & peers(process)]
            for process in killed:
                process.send_signal(signal.SIGKILL)
        found = [work.result(300) for work in reading]
    assert killed
    assert [replace(output, timings=None) for output in found] == wanted
    assert min(output.timings.replays for output in found if output.timings) > 0
    for output in (output for number, output in enumerate(found) if number % 4 > 1):
        assert all(len(json.loads(one.text)["w"]) == WORDS for one in output.outputs)
    wait_for("it to return", lambda: both_listen(cluster))


def test_a_killed_gateway_process_drops_only_its_own_connections(cluster: ServedCluster) -> None:
    before = gateways(cluster)
    before["gateway-0"].send_signal(signal.SIGKILL)
    wait_for("its end", lambda: not alive(before["gateway-0"]))
    # The sockets of a killed process may close a moment later; connections in between are reset.
    wait_for("its sockets' end", lambda: all(one.pid for one in listeners()))
    assert [ask(cluster, {"prompt": "x"})[1].status for _ in range(16)] == [200] * 16
    wait_for("it to return", lambda: both_listen(cluster))
    wait_for("it to serve", lambda: ask(cluster, {"prompt": "x"})[0] != before["gateway-1"].pid)
    assert gateways(cluster)["gateway-1"].pid == before["gateway-1"].pid


def test_a_batch_finishes_once_despite_kills(cluster: ServedCluster, batches: pathlib.Path) -> None:
    """All gateways are killed twice during the batch; finished lines in the journal are not rerun."""
    bodies = {
        f"c{n}": {"model": "tiny", "prompt": f"Once {n}", "seed": n, "max_tokens": STEPS[n % 2], "ignore_eos": True}
        for n in range(LINES)
    }
    requests = (
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name, body in bodies.items()
    )
    content = b"".join(json.dumps(one).encode() + b"\n" for one in requests)
    url = f"http://127.0.0.1:{HTTP_PORT}/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS["free"], max_retries=10, timeout=WITHIN_S) as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        cluster.arm(HELD_AT_SUBMIT, signal.SIGSTOP, point="decode, before a submit")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        folder = BatchFolder(batches, max_bytes=1, file_bytes=1, keep_s=1)

        def done() -> int:
            return folder.batch("free", batch.id).completed

        before = 0
        for left in (1, 0):
            with cluster.holding():
                wait_for("some lines to be done", lambda before=before: done() > before)
                # A restarting one would continue the batch.
                wait_for("both gateways to live", lambda: len(gateways(cluster)) == 2)
                killed = gateways(cluster).values()
                for process in killed:
                    process.send_signal(signal.SIGKILL)
                wait_for("their ends", lambda killed=killed: not any(map(alive, killed)))
                before = done()
                assert before < LINES
                check_batches(folder)
                if left:
                    cluster.arm(HELD_AT_SUBMIT, signal.SIGSTOP, point="decode, before a submit")
        wait_for("the batch to end", lambda: folder.batch("free", batch.id).over, STOP_TIMEOUT_S)
        wait_for("both gateways to return", lambda: both_listen(cluster))
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        answers = [json.loads(line) for line in client.files.content(str(batch.output_file_id)).text.splitlines()]
        assert sorted(one["custom_id"] for one in answers) == sorted(bodies)
        check_batches(folder)
        for one in answers[:: LINES // 4]:
            _, reply = ask(cluster, bodies[one["custom_id"]], path="/v1/completions")
            assert reply.json["choices"] == one["response"]["body"]["choices"]
        with pytest.raises(openai.NotFoundError):
            client.with_options(api_key=KEYS["bound"]).batches.retrieve(batch.id)


def test_both_gateway_processes_finish_their_streams_on_sigterm(cluster: ServedCluster) -> None:
    """All tokens come, over HTTP and over gRPC, and nothing is left behind."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    begun = threading.Semaphore(0)

    def read(connection: socket.socket) -> Reply:
        asked = request_bytes("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEYS['free']}"})
        connection.sendall(asked)
        received = connection.recv(1)
        begun.release()
        while chunk := connection.recv(2**16):
            received += chunk
        return parse_reply(received)

    def read_grpc() -> list[Delta]:
        with Client(cluster.target, resume_timeout_s=0) as client:
            stream = client.generate("x", max_tokens=TOKENS, ignore_eos=True)
            first = next(stream)
            begun.release()
            return [first, *stream]

    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        pids: set[int] = set()
        while len(connections) < STREAMS or len(pids) < 2:
            address = ("127.0.0.1", HTTP_PORT)
            connections.append(stack.enter_context(socket.create_connection(address, timeout=300)))
            pids.add(owner(cluster, connections[-1]))
        pool = stack.enter_context(ThreadPoolExecutor(len(connections) + GRPC_STREAMS))
        cluster.arm(STEPS_BETWEEN_LOOKS, signal.SIGSTOP)
        reading = [pool.submit(read, connection) for connection in connections]
        reading_grpc = [pool.submit(read_grpc) for _ in range(GRPC_STREAMS)]
        count = len(reading) + len(reading_grpc)
        with cluster.holding_all("all streams", lambda: begun._value == count, STEPS_BETWEEN_LOOKS):
            cluster.process.send_signal(signal.SIGTERM)
        for work in reading:
            reply = work.result(300)
            assert reply.status == 200
            assert reply.events[-1]["choices"][0]["finish_reason"] == "length"
        for stream in reading_grpc:
            deltas = stream.result(300)
            assert sum(len(delta.token_ids) for delta in deltas) == TOKENS
            assert deltas[-1].usage is not None
    assert cluster.process.wait(STOP_TIMEOUT_S) == 0
    wait_for("everything to be gone", lambda: not any(alive(one) for one in cluster.ever_seen.values()))
    assert cluster.left_behind() == []
