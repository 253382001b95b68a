"""The SDK's clients of a gateway.

- `async_client`: AsyncClient. Open it first. `client`: the blocking Client, generated from it by `make client`.
- `client_requests`: builds requests from callers' arguments. `connection`: address, TLS, API key, retries.
- `resume`: when and how a broken stream is resumed.
- `answer_schema`: the structure of an answer as a type of the caller.
- `batch`: many prompts concurrently. `outputs`: whole answers in vLLM's shape. `client_spans`: client-side tracing.

Nothing here imports a server.
"""
