"""Completions and a conversation without servers: python examples/offline.py [MODEL]"""

import sys

from pillion import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is", "def fibonacci(n):"]


def main(model: str) -> None:
    with LLM(model, max_model_len=1024, kv_pool_bytes="256MiB") as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")

        talk = []
        for question in ("Name a river.", "And a longer one?"):
            talk.append({"role": "user", "content": question})
            (output,) = llm.chat(talk, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
            answer = output.outputs[0].text
            talk.append({"role": "assistant", "content": answer})
            cached = f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached"
            print(f"{question} {answer!r} ({cached})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo")
