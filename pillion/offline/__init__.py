"""Runs the whole engine in the caller's process, as :class:`pillion.LLM`.

- `llm`: the class that users see, in vLLM's call shape. Open it first.
- `vllm_options`: options, adapters and arguments in the form in which programs for vLLM write them.
- `offline_cluster`: the KV node, decode worker and gateway behind it, on one event loop in a thread of their own.

No behaviour of the service comes in here: the components are the ones that `pillion serve` runs.
"""
