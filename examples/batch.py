"""A file of prompts, one a line, through a gateway: python examples/batch.py TARGET < prompts.txt > answers.jsonl"""

import json
import sys

from pillion import Client, PillionError, SamplingParams


def main(target: str) -> None:
    prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    sampling = SamplingParams(temperature=0, max_tokens=32)
    with Client(target) as client:
        results = client.batch(prompts, sampling=sampling, concurrency=16, progress=True, raise_errors=False)
    for prompt, result in zip(prompts, results, strict=True):
        if isinstance(result, PillionError):
            print(json.dumps({"prompt": prompt, "error": result.message}))
        else:
            print(json.dumps({"prompt": prompt, "text": result.outputs[0].text, "cached": result.num_cached_tokens}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
