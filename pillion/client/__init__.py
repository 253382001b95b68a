"""Has the SDK's clients of a gateway.

- `async_client`: AsyncClient. Open it first. `client`: the blocking Client, which `make client` writes from it.
- `client_requests`: builds requests from what callers pass. `connection`: address, TLS, API key, retries.
- `resume`: when a stream that broke is asked for again, and how.
- `answer_schema`: the structure of an answer as a type of the caller's.
- `batch`: many prompts side by side. `outputs`: whole answers in vLLM's shape. `client_spans`: client-side tracing.

Nothing in here imports a server.
"""
