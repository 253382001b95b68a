"""The process of a decode worker: prompt tails and decodes under one token budget, streams of tokens out. The worker
itself, pillion.engine.worker, and its streams, pillion.engine.streams, are shared with the prefill service.
"""
