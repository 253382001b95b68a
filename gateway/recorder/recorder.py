"""Decides which requests are recorded, and writes their bundles on a thread.

    begin --> Story, which collects --> the request ends --> recorded? --> queue, bounded --> thread: bundle, file

No stream waits for it: what does not fit into the queue is dropped and counted. A tenant cannot fill the folder alone:
bundles that clients can cause are rate-limited per tenant.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from msgspec import convert

from pillion._version import VERSION
from pillion.config import GatewayFlags
from pillion.errors import Cancelled, ConfigError, InvalidRequest, PillionError
from pillion.gateway.admission.turns import AdmissionPermit
from pillion.gateway.gateway_limits import GatewayLimits
from pillion.gateway.recorder.record_folder import make_key
from pillion.gateway.recorder.record_store import FOLDER_BYTES, REDIS, REDIS_BYTES, open_records
from pillion.gateway.recorder.story import AnswerLog, Story, described
from pillion.gateway.request.admitted_request import AdmittedRequest
from pillion.gateway.request.request_telemetry import operation_of
from pillion.gateway.request.validation import new_answer_id
from pillion.observability import metric_catalog as names
from pillion.observability.metrics import Reading
from pillion.records.bundle import (
    Bundle,
    BundleAnswer,
    BundleModel,
    BundleRequest,
    BundleWorker,
    Content,
    Reason,
    encode,
    hidden,
    read_key,
)
from pillion.types import GATEWAY_OPTIONS

log = logging.getLogger("pillion.gateway.recorder")

MAX_WAITING_STORIES = 128
TENANT_RECORDS_PER_MINUTE = 120
MINUTE_S = 60
MAX_SERVED_PREFIXES = 4096
LAST_WRITES_S = 5.0


class NotRecorded(StrEnum):
    """Why a request that was to be recorded has no bundle: the queue was full, writing failed, or the tenant was over
    its limit."""

    QUEUE_FULL = "lost"
    WRITE_FAILED = "unwritten"
    RATE_LIMITED = "over"


class Recorder:
    """Recorder of one gateway's requests. Construction blocks; it raises ConfigError for an invalid folder or key.

    Args:
        last_stall: returns begin and end of a component's last stall before a time; None if it had none.

    Attributes:
        counts: recorded requests by reason, and unrecorded ones by NotRecorded.
    """

    def __init__(
        self,
        flags: GatewayFlags,
        limits: GatewayLimits = GatewayLimits(),  # noqa: B008  (frozen)
        last_stall: Callable[[str, float], tuple[float, float] | None] = lambda component_id, now: None,
    ) -> None:
        self._flags, self._slow_ms = flags, limits.record_slow_ms
        self._last_stall = last_stall
        max_bytes = limits.record_bytes or (REDIS_BYTES if flags.record_path == REDIS else FOLDER_BYTES)
        records = open_records(flags.record_path, flags.redis_url, max_bytes, limits.record_days * 24 * 3600)
        with contextlib.ExitStack() as opened:
            self._records = opened.enter_context(records)
            self._key = own_key(flags)
            self._open = opened.pop_all()
        self.counts: Counter[str] = Counter()
        self._minute, self._tenant_records = 0, Counter[str]()
        # By model name, salt and the prompt's first block: digest of the adapter that served it last, and when.
        self._served: dict[tuple[str, str, tuple[int, ...]], tuple[str, float]] = {}
        self._jobs: queue.Queue[tuple[Story, Reason] | None] = queue.Queue(MAX_WAITING_STORIES)
        self._thread = threading.Thread(target=self._write_all, name="recorder", daemon=True)
        self._thread.start()

    def begin(self, admitted: AdmittedRequest, permit: AdmissionPermit, asked: bool) -> Story:
        """Start the story of a request that is ready to wait for its turn; ``asked``: its client requested a bundle."""
        tenant = permit.tenant.name
        chosen: Reason | None = None
        if asked and self._within_rate(tenant):
            chosen = "asked"
        elif random.random() < self._flags.record_share:  # noqa: S311  (not a secret)
            chosen = "share"
        content = self._flags.record_content
        if content == "full" and not permit.tenant.keep_content:
            content = "hash"
        story = Story(
            id=new_answer_id(),
            content=content,
            admitted=admitted,
            tenant=tenant,
            chosen=chosen,
            answers=[AnswerLog() for _ in range(permit.answers)],
            on_end=self._ended,
        )
        story.ready(time.monotonic())
        adapter, then_s = self._served.get(self._prefix_key(admitted), (admitted.adapter, 0.0))
        if adapter != admitted.adapter:
            story.adapter_changed(time.monotonic(), self._flags.block_size, adapter, then_s)
        return story

    def readings(self) -> Iterator[Reading]:
        """Yield the counter of recorded and unrecorded requests."""
        for reason, count in tuple(self.counts.items()):
            yield names.RECORDED, (reason,), count

    def close(self) -> None:
        """End the thread once it has written what waits, or after LAST_WRITES_S. Blocks."""
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=LAST_WRITES_S)
        self._thread.join(LAST_WRITES_S)

    def _prefix_key(self, admitted: AdmittedRequest) -> tuple[str, str, tuple[int, ...]]:
        return admitted.asked.model, admitted.cache_salt, admitted.prompt[: self._flags.block_size]

    def _ended(self, story: Story) -> None:
        """Queue the story of an ended request if it is to be recorded."""
        admitted = story.admitted
        if admitted.adapter and len(admitted.prompt) > self._flags.block_size and story.answers[0].first_s:
            self._served.pop(self._prefix_key(admitted), None)
            self._served[self._prefix_key(admitted)] = admitted.adapter, story.ended_s
            if len(self._served) > MAX_SERVED_PREFIXES:
                del self._served[next(iter(self._served))]
        reason = self._why(story) or story.chosen
        if reason is None:
            return
        if story.chosen is None and not self._within_rate(story.tenant):
            self.counts[NotRecorded.RATE_LIMITED] += 1
            return
        for worker in story.workers():
            if (stall := self._last_stall(worker.component_id, story.ended_s)) is not None:
                story.stalled(worker.component_id, *stall)
        try:
            self._jobs.put_nowait((story, reason))
        except queue.Full:
            self.counts[NotRecorded.QUEUE_FULL] += 1

    def _why(self, story: Story) -> Reason | None:
        """Return "failed", "slow" or None."""
        # A client's error or cancellation is not a failure.
        if story.error is not None and not isinstance(story.error, Cancelled | InvalidRequest):
            return "failed"
        slow_ms = 0 if story.admitted.background else self._slow_ms
        return "slow" if slow_ms and story.longest_wait_s * 1000 > slow_ms else None

    def _within_rate(self, tenant: str) -> bool:
        """Count one more record of a tenant in this minute, and return whether it is allowed."""
        minute = int(time.monotonic() // MINUTE_S)
        if minute != self._minute:
            self._minute, self._tenant_records = minute, Counter()
        self._tenant_records[tenant] += 1
        return self._tenant_records[tenant] <= TENANT_RECORDS_PER_MINUTE

    def _write_all(self) -> None:
        with self._open:
            while (job := self._jobs.get()) is not None:
                self._write(*job)

    def _write(self, story: Story, reason: Reason) -> None:
        label = story.admitted.request_id
        try:
            bundle = bundle_of(story, reason, self._flags, self._slow_ms, self._key)
            self._records.store(story.id, encode(bundle, self._key))
        except Exception as error:
            if not self.counts[NotRecorded.WRITE_FAILED]:
                # Logged once: a full disk or an absent Redis would fill the log.
                why = error.strerror if isinstance(error, OSError) else str(error)
                defect = None if isinstance(error, OSError | PillionError) else error
                log.warning("request %s and maybe others are not recorded: %s", label, why, exc_info=defect)
            self.counts[NotRecorded.WRITE_FAILED] += 1
        else:
            self.counts[reason] += 1
            log.info("request %s is recorded as %s: %s", label, story.id, reason)


def own_key(flags: GatewayFlags) -> bytes:
    """Return the gateway's signing key. Raises ConfigError."""
    if flags.record_key_file:
        return read_key(Path(flags.record_key_file))
    if flags.record_path == REDIS:
        raise ConfigError(f"--record-path {REDIS} needs --record-key-file, the same key for all gateways")
    return make_key(Path(flags.record_path))


def bundle_of(story: Story, reason: Reason, flags: GatewayFlags, slow_ms: int, key: bytes) -> Bundle:
    """Create the bundle of an ended request."""
    admitted, content = story.admitted, story.content
    ago_s, asked = time.monotonic() - admitted.arrived, admitted.asked.model
    replayed_flags = ("split_policy", "chunk_size", "enable_chunked_prefill", "enable_prefix_caching")
    model = BundleModel(name=admitted.model, fingerprint=admitted.fingerprint, asked=asked, adapter=admitted.adapter)
    return Bundle(
        id=story.id,
        created_unix_ms=round((time.time() - ago_s) * 1000),
        reason=reason,
        tenant=story.tenant,
        content=content,
        version=VERSION,
        model=model,
        request=_request(admitted, content, key),
        answers=tuple(_answers(story, content, key)),
        story=story.events(),
        slow_ms=slow_ms,
        flags={name.replace("_", "-"): str(getattr(flags, name)) for name in replayed_flags},
        workers=tuple(convert(one, BundleWorker, from_attributes=True) for one in story.workers()),
        error="" if story.error is None else described(story.error),
        usage=story.usage,
        timings=story.timings,
    )


def _request(admitted: AdmittedRequest, content: Content, key: bytes) -> BundleRequest:
    asked, sampling = admitted.asked, replace(admitted.sampling, bad_words_token_ids=())
    texts: dict[str, Any] = {
        "token_ids": admitted.prompt,
        "messages": asked.messages,
        "grammar": admitted.grammar.text,
        "bad_words": admitted.sampling.bad_words_token_ids,
    }
    if content == "full":
        texts |= {"chat": asked.chat, "tools": asked.tools}
        sampling = replace(sampling, **{name: getattr(asked.sampling, name) for name in GATEWAY_OPTIONS})
    else:
        given = {**texts, "stop": asked.sampling.stop} if content == "hash" else {}
        texts = {"hmacs": {name: hidden(key, name, value) for name, value in given.items() if value}}
        sampling = replace(sampling, logit_bias={}, allowed_token_ids=())
    return BundleRequest(
        operation=operation_of(admitted),
        label=admitted.request_id,
        prompt_tokens=len(admitted.prompt),
        sampling=sampling,
        priority=admitted.priority,
        resumed_tokens=admitted.resumed_tokens,
        **texts,
    )


def _answers(story: Story, content: Content, key: bytes) -> Iterator[BundleAnswer]:
    """Yield the bundle's answers, finished or not; none for an embedding request."""
    if story.admitted.pooling is not None:
        return
    shows = content == "full" and story.admitted.asked.sampling.logprobs is not None
    for answer in story.answers:
        ids = tuple(answer.token_ids)
        yield BundleAnswer(
            tokens=len(ids),
            token_ids=ids if content == "full" else (),
            hmac=hidden(key, "answer", ids) if content == "hash" and ids else "",
            finish_reason=answer.finish_reason,
            logprobs=tuple(answer.logprobs) if shows else (),
            times=answer.times(story.admitted.arrived),
        )
