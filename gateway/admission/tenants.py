"""Tenants: permissions, limits, quotas and cache isolation. Sans-IO (I9).

API key --keyring--> tenant --> salt of every block hash, priority cap, quotas, limits, weight in all queues
no keyring ---------> OPEN: one tenant for all, with only the gateway's limits
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field, replace

from pillion.errors import Overloaded, QuotaViolation
from pillion.rules.priority import MAX_PRIORITY, NO_FLOW, Flow

# Limit of a tenant without one of its own, as a share of the gateway's limit less the other tenants' usage. If n
# tenants flood the gateway, each gets 1/(n+1), and 1/(n+1) stays free for the next: the dynamic threshold of Choudhury
# and Hahne ("Dynamic queue length thresholds for shared-memory packet switches", 1998).
TENANT_SHARE = 0.5
# Limit of background requests, as a share of any limit. A background request starts only if it and all other requests
# use at most this share of a model's slots.
BACKGROUND_SHARE = 0.5
MINUTE_S = 60.0
QUOTAS = ("requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant as in the keys file. A limit of 0 means no limit besides the gateway's.

    Attributes:
        name: name in errors and in the salt; "" is the only tenant of a gateway without keys.
        weight: share of the cluster while several tenants wait, relative to the other tenants' weights.
        requests_per_minute, tokens_per_minute: quotas; tokens are those of prompts and answers.
        most_urgent_priority: cap on the urgency of requests. Smaller is more urgent and preempts other tenants'
            streams, so the default is 0, the usual priority. At MAX_PRIORITY the tenant is served in the background.
        max_inflight_requests, max_inflight_tokens: limits on answers and prompt tokens in the gateway.
        max_pinned_tokens: limit on prefix-pinned tokens at each KV node, in addition to a quarter of the pool.
        cache_group: tenants of the same group share KV; "" for no sharing.
        operator: True if it may see the whole cluster (GetStatus), and load and unload adapters.
        models: names of the models and adapters that the tenant may use; empty for all.
        keep_content: True if bundles may contain its texts and tokens, for replay and mirroring.
    """

    name: str
    weight: float = 1.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    most_urgent_priority: int = 0
    max_inflight_requests: int = 0
    max_inflight_tokens: int = 0
    max_pinned_tokens: int = 0
    cache_group: str = ""
    operator: bool = False
    models: tuple[str, ...] = ()
    keep_content: bool = True

    def may_use(self, name: str) -> bool:
        """Return whether the tenant may use this model or adapter."""
        return not self.models or name in self.models

    def capped(self, priority: int) -> int:
        """Return ``priority``, limited to the tenant's most urgent priority."""
        return max(priority, self.most_urgent_priority)

    @property
    def has_quotas(self) -> bool:
        """True if the tenant has a quota per minute."""
        return bool(self.requests_per_minute or self.tokens_per_minute)

    @property
    def background(self) -> bool:
        """True if the tenant's requests are background requests, which use only otherwise free slots."""
        return self.most_urgent_priority >= MAX_PRIORITY

    def in_background(self) -> Tenant:
        """Return a copy of this tenant for background requests, with the same quotas and salt."""
        return replace(self, most_urgent_priority=MAX_PRIORITY)


OPEN = Tenant(name="", operator=True, most_urgent_priority=-MAX_PRIORITY)


def share_of(tenant: Tenant, whole: int, others: int) -> int:
    """Return a tenant's share of the limit ``whole`` while other tenants use ``others``: all of it for the only tenant
    of a gateway without keys."""
    return max(1, int((whole - others) * TENANT_SHARE)) if tenant.name else whole


def flow_of(tenant: Tenant, model: str) -> Flow:
    """Return a tenant's flow at the workers of a model, given by its fingerprint: the weight, and a key that is the
    same at all gateways and does not reveal the name. Background requests are a separate flow, as in the gateway's
    queues."""
    if not tenant.name:
        return NO_FLOW
    kind = "background" if tenant.background else "flow"
    digest = hashlib.sha256(f"{kind}:{len(tenant.name)}:{tenant.name}:{model}".encode()).digest()
    return Flow(digest[:16], tenant.weight)


def cache_salt(tenant: Tenant, given: str) -> str:
    """Return the salt of a request's block hashes; ``given`` is the client's own ``cache_salt``.

    The client's salt is appended to the tenant's. Names are preceded by their length and kind, so that different
    tenants never have the same salt, whatever a client sends.
    """
    if tenant.cache_group:
        return f"group:{len(tenant.cache_group)}:{tenant.cache_group}:{given}"
    if tenant.name:
        return f"tenant:{len(tenant.name)}:{tenant.name}:{given}"
    return f"open:{given}" if given else ""


@dataclass(frozen=True, slots=True)
class BoundMet:
    """A limit that refuses a request.

    Attributes:
        tenant: name of the tenant whose limit it is; "" for the gateway's limit.
        own: True for a limit configured for the tenant.
        lacking: units that must become free.
        text: message for the client.
    """

    tenant: str
    own: bool
    lacking: int
    text: str


@dataclass(slots=True)
class ConcurrencyLimit:
    """A limit of ``whole`` units on all requests in the gateway, and its usage.

    Attributes:
        name: name of the flag, and of the field with a tenant's own limit.
        what: name of the unit, for messages.
        of_prompts: True if it counts prompts by weight: a single prompt is always admitted. False if it counts answers.
        total, of: units in use, in total and by tenant.
    """

    name: str
    what: str
    whole: int
    of_prompts: bool
    total: int = 0
    of: Counter[str] = field(default_factory=Counter)

    def take(self, tenant: str, amount: int) -> None:
        """Count ``amount`` more units of a tenant."""
        self.total += amount
        self.of[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Count ``amount`` fewer units of a tenant."""
        self.total -= amount
        self.of[tenant] -= amount
        if not self.of[tenant]:
            del self.of[tenant]

    def met(self, tenant: Tenant, amount: int, freed: Counter[str] | None = None) -> BoundMet | None:
        """Return the limit that refuses ``amount`` more units for a tenant if the units ``freed``, by tenant, were
        free; None if they are admitted."""
        freed = freed or Counter()
        total, own = self.total - freed.total(), self.of[tenant.name] - freed[tenant.name]
        room, limit = _room(tenant, self.whole), self.limit(tenant, total - own)
        if total + amount > room and (total or not self.of_prompts):
            text = f"{self.name} ({room}) {self.what} are in progress"
            return BoundMet("", False, total + amount - room, text)
        if own + amount > limit and (own or not self.of_prompts):
            text = f"{self.name} ({limit}) {self.what} of tenant {tenant.name!r} are in progress"
            return BoundMet(tenant.name, bool(getattr(tenant, self.name)), own + amount - limit, text)
        return None

    def refusal(self, met: BoundMet, text: str, retry_after_ms: int) -> Overloaded:
        """Return the error for a request that is refused or preempted."""
        subject = f"{met.tenant}/{self.name}" if met.tenant else self.name
        return Overloaded(text, retry_after_ms, (QuotaViolation(subject, text),))

    def check_integrity(self) -> None:
        """Raise AssertionError if the tenants' counts do not sum to the gateway's."""
        assert self.total == self.of.total(), f"{self.name}: {self.total} are in use, {dict(self.of)} by tenant"
        assert all(count > 0 for count in self.of.values()), f"{self.name}: {dict(self.of)}"

    def limit(self, tenant: Tenant, others: int = 0) -> int:
        """Return a tenant's limit while other tenants use ``others``. The only tenant of a gateway without keys has
        the whole limit."""
        own: int = getattr(tenant, self.name)
        if own or not tenant.name:
            return _room(tenant, min(own or self.whole, self.whole))
        return _room(tenant, share_of(tenant, self.whole, others))


def _room(tenant: Tenant, bound: int) -> int:
    """Return the part of a limit up to which requests of the tenant are admitted: BACKGROUND_SHARE of it for background
    requests."""
    return max(1, int(bound * BACKGROUND_SHARE)) if tenant.background else bound


class Bucket:
    """Token bucket of one quota, with ``per_minute`` as size and rate."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Return the seconds until ``amount`` can be taken; 0 if it can be taken now. An amount above the bucket's size
        needs a full bucket."""
        missing = min(amount, self.per_minute) - self._filled(now_s)
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: int, now_s: float) -> None:
        """Take ``amount`` from the bucket, which may leave a debt."""
        self._level = self._filled(now_s) - amount
        self._at_s = now_s

    def resized(self, per_minute: int, now_s: float) -> Bucket:
        """Return a bucket of another size, from which the same amount is missing."""
        # Rounded, so that a floating-point error does not count as one more.
        spent = round(self.per_minute - self._filled(now_s), 6)
        other = Bucket(per_minute, now_s)
        other.take(math.ceil(spent), now_s)
        return other

    def _filled(self, now_s: float) -> float:
        gained = max(0.0, now_s - self._at_s) / MINUTE_S * self.per_minute
        return min(float(self.per_minute), self._level + gained)


def used_up(tenant: Tenant, quota: str, wait_ms: int) -> Overloaded:
    """Return the error for a request that exceeds ``quota``, one of QUOTAS."""
    text = f"{quota} of tenant {tenant.name!r} ({getattr(tenant, quota)}) is used up"
    return Overloaded(text, wait_ms, (QuotaViolation(f"{tenant.name}/{quota}", text),))
