"""Admission of requests: API keys, concurrency limits, quotas and queues. Open admission.py first.

Nothing here plans or runs a request.
"""
