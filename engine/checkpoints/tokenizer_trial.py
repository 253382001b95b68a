"""Program that loads and uses a tokenizer.json with limited memory and time.

Run as a file, never imported; needs only the standard library and tokenizers. Reads a JSON object from stdin: "path";
the limits "cpu_s" and "memory_bytes"; "end", the text of the EOS token, or null. Writes a JSON object to stdout: "end",
the id of that token or null, and "largest", the largest id; or "wrong", an error message.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from typing import Any

# Max growth of a text's length by a normalizer or decoder; Unicode normalization reaches a factor of 18.
MAX_GROWTH = 32
_SAMPLE = "".join(map(chr, (*range(0x20, 0x250), *range(0x390, 0x3D0), *range(0x4E00, 0x4E20), 0x1F600, 0xFDFA)))


def growth(component: Any) -> float:
    """Return the max factor by which the replacements of a normalizer or decoder, as JSON, lengthen a text."""
    if not isinstance(component, dict):
        return 1.0
    factor = 1.0
    for name in ("normalizers", "decoders"):
        for item in component.get(name) or ():
            factor *= growth(item)
    if component.get("type") == "Replace":
        pattern, content = component.get("pattern"), component.get("content")
        plain = pattern.get("String") if isinstance(pattern, dict) else None
        factor *= max(1.0, len(str(content)) / max(1, len(plain or "")))
    return factor


def run_trial(setup: dict[str, Any]) -> dict[str, Any]:
    """Return the program's output for its input ``setup``."""
    with open(setup["path"], encoding="utf-8") as file:
        content = json.load(file)
    for part in ("normalizer", "decoder"):
        factor = growth(content.get(part))
        if factor > MAX_GROWTH:
            return {
                "wrong": f"its {part} makes texts {factor:,.0f} times longer; at most {MAX_GROWTH} times is allowed"
            }
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
        # macOS does not support this limit.
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
