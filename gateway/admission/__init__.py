"""Admission of requests: API keys, concurrency limits, quotas, and the queues. Open admission.py first.

Nothing here plans or runs a request.
"""
