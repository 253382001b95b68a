"""The prefill service: spans of chunks in, committed KV blocks out."""
