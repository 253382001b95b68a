"""Is the process of a decode worker: prompt tails and decodes under one token budget, streams of tokens out. The worker
itself, pillion.engine.worker, is the same as behind the prefill service, and so is what serves its streams,
pillion.engine.streams.

It has no scheduling policy (pillion.engine.scheduling) and no text: tokens become text in the gateway.
"""
