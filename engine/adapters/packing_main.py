"""The process that reads and packs a worker's adapters beside its steps: ``python -m`` runs it.

It shares no interpreter with the steps, and it is nicer than they are. It speaks over its standard streams. First comes
a line that describes an AdapterReader; then each line of input, a JSON list of a folder and a digest, has an answer: a
head, JSON, and the bytes of the packed adapter.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pillion.cores import BACKGROUND_NICENESS
from pillion.engine.adapters.adapter_forms import Bytes, made
from pillion.engine.adapters.adapter_reader import AdapterReader
from pillion.errors import ConfigError

# The bytes of an answer's JSON, and of what follows it.
ANSWER_HEAD = struct.Struct("<QQ")


def serve(jobs: BinaryIO, answers: BinaryIO) -> None:
    """Works until there are no more jobs, which is when the worker has ended."""
    reader: AdapterReader = made(json.loads(jobs.readline()))
    for job in jobs:
        folder, digest = json.loads(job)
        about, data = _answer(reader, Path(folder), digest)
        words = json.dumps(about).encode()
        answers.write(ANSWER_HEAD.pack(len(words), data.nbytes) + words)
        answers.write(data.data)
        answers.flush()
        # Until the next job they would be memory that nobody needs.
        del about, data, words


def _answer(reader: AdapterReader, folder: Path, digest: str) -> tuple[dict[str, Any], Bytes]:
    nothing = np.zeros(0, np.uint8)
    try:
        about, data = reader.packed(folder, digest)
    except ConfigError as error:
        return {"refused": error.message}, nothing
    except Exception as error:  # noqa: BLE001  (the worker reports it, and the next adapter may do)
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}, nothing
    return {"about": about}, data


if __name__ == "__main__":
    os.nice(BACKGROUND_NICENESS)
    # Signals for the whole process group are the worker's to answer; this process ends with its input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with suppress(BrokenPipeError), os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        # What prints by chance must not come between answers.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin.buffer, answers)
