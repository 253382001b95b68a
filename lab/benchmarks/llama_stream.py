"""llama.cpp on one stream, run by a Python with llama-cpp-python; imports nothing of this project.

usage: llama_stream.py MODEL.gguf THREADS CONTEXT_TOKENS
       llama_stream.py MODEL.gguf COPY.gguf

The first form reads one JSON line per request, ``{"prompt": [ids], "max_tokens": n}``, and answers with one line of
times: ``{"asked_s": t, "token_s": [t, ...]}``. It calls the C API directly, so that the times contain no Python of the
wrapper: the peer's best case, without server and tokenizer. The second form writes a bfloat16 copy.

`pip install llama-cpp-python` compiles llama.cpp for this processor. With AMX, an older GCC (e.g. 12.2) makes a library
that ends with SIGILL: its `_tile_loadconfig` declares 8 of the 64 bytes that the instruction reads, so the stores of
tile shapes are removed as dead. `CXXFLAGS="-fno-tree-dse -fno-dse"` keeps them.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

# LLAMA_FTYPE_MOSTLY_BF16.
BF16 = 32


class Greedy:
    """One context over one model, with the greedy sampler."""

    def __init__(self, api: Any, path: str, threads: int, context_tokens: int) -> None:
        self.api = api
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = api.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_threads = params.n_threads_batch = threads
        self.batch_tokens = int(params.n_batch)
        self.context = api.llama_init_from_model(self.model, params)
        self.sampler = api.llama_sampler_init_greedy()

    def answer(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Generate an answer; return the times of the request and of each token, on one clock."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        asked, times = time.perf_counter(), []
        for start in range(0, len(prompt), self.batch_tokens):
            self.decode(prompt[start : start + self.batch_tokens])
        while True:
            token = self.api.llama_sampler_sample(self.sampler, self.context, -1)
            times.append(time.perf_counter())
            if len(times) == max_tokens:
                return {"asked_s": asked, "token_s": times}
            self.decode([token])

    def decode(self, ids: list[int]) -> None:
        """Append ``ids`` to the context. Raises RuntimeError if llama.cpp refuses."""
        tokens = (self.api.llama_token * len(ids))(*ids)
        status = self.api.llama_decode(self.context, self.api.llama_batch_get_one(tokens, len(ids)))
        if status:
            raise RuntimeError(f"llama_decode: {status}")


def write_bf16(api: Any, path: str, copy: str) -> None:
    """Write a model in bfloat16."""
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = BF16, True
    if api.llama_model_quantize(path.encode(), copy.encode(), params):
        raise SystemExit(f"llama.cpp cannot convert {path}")


def main() -> None:
    """Serve standard input until it ends, or write a copy."""
    api: Any = importlib.import_module("llama_cpp")
    path, *rest = sys.argv[1:]
    if len(rest) == 1:
        write_bf16(api, path, *rest)
        return
    threads, context_tokens = rest
    stream = Greedy(api, path, int(threads), int(context_tokens))
    print(json.dumps({"version": api.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(stream.answer(asked["prompt"], asked["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()
