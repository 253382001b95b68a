"""What `make compose-check` and a long test let docker-compose.yml do on an engine of Docker."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Callable

from pillion.types import FinishReason
from tests.support.docker_engine import DockerEngine
from tests.support.docker_project import DockerProject

SCALE = {"prefill": 2, "decode": 2}
STREAMS, TOKENS = 8, 200
PROMPTS = [f"Here is the story of number {number}: " + "it grew and grew. " * 20 for number in range(STREAMS)]
# Exit code of a container that ends by SIGTERM itself.
TERMINATED = 128 + 15


def serve_on_engine(engine: DockerEngine, say: Callable[[str], None]) -> None:
    """Build the image, serve 2 and 2 workers, kill containers in the middle of streams over both APIs and by `pillion
    drill`, stop, and leave nothing. Raises NoDockerError where something is missing for that, and AssertionError."""
    with tempfile.TemporaryDirectory(prefix="pil-") as folder:
        began_s = time.monotonic()
        image = engine.build()
        say(f"{image} built after {time.monotonic() - began_s:.0f} s")
        project = DockerProject(engine, image, pathlib.Path(folder), SCALE)
        try:
            began_s = time.monotonic()
            project.up()
            say(f"up after {time.monotonic() - began_s:.0f} s")
            _kill_amid_streams(project, say)
            say(project.drill("decode", "prefill", "kvnode", "redis"))
            codes = project.stop()
            say(f"stopped: {codes}")
            assert {name for name, code in codes.items() if code} == {name for name in codes if "keeper" in name}
            assert all(code == TERMINATED for name, code in codes.items() if "keeper" in name)
        except BaseException:
            say(project.log())
            raise
        finally:
            left = project.down()
        assert left == "", f"left of the project: {left}"


def _kill_amid_streams(project: DockerProject, say: Callable[[str], None]) -> None:
    with project.addresses.streams(PROMPTS, TOKENS) as streams:
        pass
    texts = [stream.text for stream in streams]
    assert all(stream.finish == FinishReason.LENGTH for stream in streams)
    say(f"{STREAMS} streams over both APIs, longest pause {max(stream.pause_s for stream in streams):.2f} s")
    for service in ("decode", "kvnode"):
        before = project.replays()
        kill = project.kill(service, PROMPTS, TOKENS, texts)
        say(str(kill))
        assert kill.running, "the kill came after the end of every stream"
        assert service != "decode" or project.replays() > before, "no stream was on the worker that was killed"
        assert (kill.lost, kill.differing) == (0, 0)
