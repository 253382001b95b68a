"""Program that tries a tokenizer.json in a process with limited memory and time.

Run as a file, never imported; needs only the standard library and tokenizers. Reads a JSON object from stdin: "path";
the limits "cpu_s" and "memory_bytes"; "end", the text of the EOS token, or null. Writes another one to stdout: "end",
that token's id or null, and "largest", the largest id; or "wrong", the error.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any

# Max growth of a text under a tokenizer's replacements; Unicode's own rules reach 18.
MAX_GROWTH = 32
_SAMPLE = "".join(map(chr, (*range(0x20, 0x250), *range(0x390, 0x3D0), *range(0x4E00, 0x4E20), 0x1F600, 0xFDFA)))


def growth(part: Any) -> float:
    """Return by which factor a normalizer or decoder can lengthen a text, judged by its replacements."""
    if not isinstance(part, dict):
        return 1.0
    times = 1.0
    for name in ("normalizers", "decoders"):
        for one in part.get(name) or ():
            times *= growth(one)
    if part.get("type") == "Replace":
        pattern, content = part.get("pattern"), part.get("content")
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        times *= max(1.0, len(str(content)) / max(1, len(plain or "")))
    return times


def run_trial(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the program's output."""
    with open(setup["path"], encoding="utf-8") as file:
        written = json.load(file)
    for part in ("normalizer", "decoder"):
        times = growth(written.get(part))
        if times > MAX_GROWTH:
            return {"wrong": f"its {part} makes texts {times:,.0f} times longer; at most {MAX_GROWTH} times is allowed"}
    import tokenizers

    codec = tokenizers.Tokenizer.from_file(setup["path"])
    codec.no_truncation()
    codec.no_padding()
    if codec.normalizer is not None and len(codec.normalizer.normalize_str(_SAMPLE)) > MAX_GROWTH * len(_SAMPLE):
        return {"wrong": f"its normalizer makes texts more than {MAX_GROWTH} times longer"}
    codec.decode(codec.encode(_SAMPLE).ids)
    largest = max(codec.get_vocab(with_added_tokens=True).values(), default=-1)
    return {"end": None if setup["end"] is None else codec.token_to_id(setup["end"]), "largest": largest}


def main() -> None:
    setup = json.load(sys.stdin)
    with contextlib.suppress(ValueError, OSError):
        # macOS rejects this limit.
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (setup["cpu_s"], setup["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        answer = run_trial(setup)
    except Exception as error:  # noqa: BLE001  (the library raises bare Exception)
        answer = {"wrong": (str(error).strip().splitlines() or [type(error).__name__])[0][:1000]}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
