"""A worker's streams, over one gRPC connection per gateway: commands in, batches of deltas out.

Open first: stream_session.py, which follows a stream from its submit to its last delta.

A decode worker takes every stream; a prefill worker those that end with a vector, which are never sampled. Scheduling
is in pillion.engine.scheduling, text in the gateway.
"""
