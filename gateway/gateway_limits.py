"""Limits and periods of a gateway that no flag sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GatewayLimits:
    """Limits and periods of a gateway that no flag sets.

    Attributes:
        max_attempts: consecutive attempts of a request without a token before it fails.
        max_running_requests: concurrent requests per model at its workers; each tenant's first request may exceed it.
            0: --max-num-seqs of all decode workers plus a quarter, at least 16 more, so that no sequence slot is empty.
        max_read_ahead: waiting requests whose KV is fetched from lower tiers at the same time.
        keep_alive_s: idle time of an HTTP connection; above the 60 s of common load balancers.
        stream_ping_ms: period of comments (pings in Messages) in a stream before its first token, so that proxies keep
            the connection; 0 sends none.
        batch_bytes: max size of the folder of --batch-path.
        batch_file_bytes: max size of an uploaded file.
        batch_keep_days: age at which files and ended batches are removed.
        max_batch_requests: concurrent requests of batches.
        record_bytes: max total size of bundles; 0 is the default of a folder or Redis
            (:mod:`pillion.gateway.recorder`).
        record_days: age at which bundles are removed.
        record_slow_ms: wait for a token above which a request is recorded as slow; 0 records no slow requests.
    """

    max_attempts: int = 4
    max_running_requests: int = 0
    max_read_ahead: int = 2
    keep_alive_s: int = 75
    stream_ping_ms: int = 10_000
    batch_bytes: int = 10 * 2**30
    batch_file_bytes: int = 200 * 2**20
    batch_keep_days: int = 30
    max_batch_requests: int = 32
    record_bytes: int = 0
    record_days: int = 30
    record_slow_ms: int = 10_000
