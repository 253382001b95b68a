"""Says what each tenant may use, counts its quotas, and says how its cache is kept apart. Sans-IO (I9).

API key --keyring--> tenant --> salt of every block hash, priority cap, quotas, bounds, weight in all queues
no keyring ---------> OPEN: one tenant for everybody, nothing bounded but the gateway itself
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field, replace

from pillion.errors import Overloaded, QuotaViolation
from pillion.rules.priority import MAX_PRIORITY, NO_FLOW, Flow

# A tenant without bounds of its own may fill this share of what the other tenants leave of the gateway's bounds. Where
# n tenants flood the gateway, each gets 1/(n+1) of it, and as much stays free for the next one: this is the dynamic
# threshold of Choudhury and Hahne ("Dynamic queue length thresholds for shared-memory packet switches", 1998).
TENANT_SHARE = 0.5
# Requests in the background fill at most this share of any bound, and one of them begins only where no more than this
# share of a model's slots is then in use, by any request.
BACKGROUND_SHARE = 0.5
MINUTE_S = 60.0
# These names of quotas are fields of a tenant, in the order in which a request is judged by them.
QUOTAS = ("requests_per_minute", "tokens_per_minute")
# Workers know a tenant by so many bytes.
FLOW_KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Describes one tenant as the keys file has it. A bound of 0 is no bound of its own.

    Attributes:
        name: its name in errors and in the salt; "" is the only tenant of a gateway without keys.
        weight: share of the cluster where several tenants wait; 2 gets twice what 1 gets.
        requests_per_minute, tokens_per_minute: its rates; tokens are those of prompts and answers.
        most_urgent_priority: its requests are never more urgent than this. Smaller is more urgent and takes memory from
            other tenants' streams, so without a permission it is 0, the usual priority. At MAX_PRIORITY the tenant is
            served in the background.
        max_inflight_requests, max_inflight_tokens: the most answers and prompt tokens in the gateway at once.
        max_pinned_tokens: the tokens that it may have pinned at each KV node, below a quarter of the
            pool.
        cache_group: tenants of one group share KV; "" shares with nobody.
        operator: whether it may see the whole cluster (GetStatus), and load and unload adapters.
        models: the names of the models and adapters that it may use; empty for all.
        keep_content: whether bundles may keep its texts and tokens, so that it is replayed and mirrored.
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
        """Returns whether the tenant may use the model, or the adapter, of this name."""
        return not self.models or name in self.models

    def capped(self, priority: int) -> int:
        """Returns the priority that a request of this tenant gets where it asks for ``priority``."""
        return max(priority, self.most_urgent_priority)

    @property
    def has_quotas(self) -> bool:
        """Says whether what the tenant spends is counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute)

    @property
    def background(self) -> bool:
        """Says whether the tenant's requests run only in places that nobody else wants."""
        return self.most_urgent_priority >= MAX_PRIORITY

    def in_background(self) -> Tenant:
        """Returns a copy of this tenant, with its quotas and its salt, whose requests run in the background."""
        return replace(self, most_urgent_priority=MAX_PRIORITY)


OPEN = Tenant(name="", operator=True, most_urgent_priority=-MAX_PRIORITY)


def share_of(tenant: Tenant, whole: int, others: int) -> int:
    """Returns how much of a bound ``whole`` a tenant may use, while other tenants use ``others``. The only tenant of a
    gateway without keys may use it all."""
    return max(1, int((whole - others) * TENANT_SHARE)) if tenant.name else whole


def flow_of(tenant: Tenant, model: str) -> Flow:
    """Returns what the workers of a model, given by its fingerprint, are told of a tenant: a key that says nothing of
    its name, and is the same at all gateways, and its weight. What it has in the background is a flow of its own, as it
    is in the gateway's lines."""
    if not tenant.name:
        return NO_FLOW
    kind = "background" if tenant.background else "flow"
    digest = hashlib.sha256(f"{kind}:{len(tenant.name)}:{tenant.name}:{model}".encode()).digest()
    return Flow(digest[:FLOW_KEY_BYTES], tenant.weight)


def cache_salt(tenant: Tenant, given: str) -> str:
    """Returns the salt of a request's block hashes; ``given`` is the client's own ``cache_salt``.

    The client's salt is added after the tenant's and never replaces it. A name carries its length, and each kind its
    own tag, so two different pairs never read the same, whatever a client sends.
    """
    if tenant.cache_group:
        return f"group:{len(tenant.cache_group)}:{tenant.cache_group}:{given}"
    if tenant.name:
        return f"tenant:{len(tenant.name)}:{tenant.name}:{given}"
    return f"open:{given}" if given else ""


@dataclass(frozen=True, slots=True)
class BoundMet:
    """Says which bound refuses a request. ``tenant`` is "" for the gateway's own bound; ``own`` says whether it is one
    that the tenant itself has; ``lacking`` is how much has to become free; ``text`` is for the client."""

    tenant: str
    own: bool
    lacking: int
    text: str


@dataclass(slots=True)
class ConcurrencyLimit:
    """Counts one kind of thing that all requests in the gateway hold together, of which there may be ``whole``.

    Attributes:
        name: the flag's name, which a tenant's own bound has too.
        what: what is counted, for people.
        of_prompts: whether it counts prompts by their weight, one of which is always admitted however long it is; else
            it counts answers.
    """

    name: str
    what: str
    whole: int
    of_prompts: bool
    total: int = 0
    of: Counter[str] = field(default_factory=Counter)

    def take(self, tenant: str, amount: int) -> None:
        """Notes that a tenant's request holds so much more."""
        self.total += amount
        self.of[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Notes that a tenant's request holds so much less."""
        self.total -= amount
        self.of[tenant] -= amount
        if not self.of[tenant]:
            del self.of[tenant]

    def met(self, tenant: Tenant, amount: int, freed: Counter[str] | None = None) -> BoundMet | None:
        """Returns the bound that keeps a tenant from holding so much more, once tenants have given back what is
        ``freed``; None where there is room."""
        freed = freed or Counter()
        total, own = self.total - freed.total(), self.of[tenant.name] - freed[tenant.name]
        room, most = _room(tenant, self.whole), self.most(tenant, total - own)
        if total + amount > room and (total or not self.of_prompts):
            text = f"{self.name} ({room}) {self.what} are under way"
            return BoundMet("", False, total + amount - room, text)
        if own + amount > most and (own or not self.of_prompts):
            text = f"{self.name} ({most}) {self.what} of tenant {tenant.name!r} are under way"
            return BoundMet(tenant.name, bool(getattr(tenant, self.name)), own + amount - most, text)
        return None

    def refusal(self, met: BoundMet, text: str, retry_after_ms: int) -> Overloaded:
        """Makes the error of a request that has no room, because a bound is met or because it gave way."""
        subject = f"{met.tenant}/{self.name}" if met.tenant else self.name
        return Overloaded(text, retry_after_ms, (QuotaViolation(subject, text),))

    def check_integrity(self) -> None:
        """Raises AssertionError where the tenants' counts do not add up to the gateway's."""
        assert self.total == self.of.total(), f"{self.name}: {self.total} are held, {dict(self.of)} by tenant"
        assert all(count > 0 for count in self.of.values()), f"{self.name}: {dict(self.of)}"

    def most(self, tenant: Tenant, others: int = 0) -> int:
        """Returns how much a tenant may hold while other tenants hold ``others``. The only tenant of a gateway without
        keys may hold it all."""
        own: int = getattr(tenant, self.name)
        if own or not tenant.name:
            return _room(tenant, min(own or self.whole, self.whole))
        return _room(tenant, share_of(tenant, self.whole, others))


def _room(tenant: Tenant, bound: int) -> int:
    """Returns how much of a bound may be held, by all requests, for one more request of the tenant to be admitted."""
    return max(1, int(bound * BACKGROUND_SHARE)) if tenant.background else bound


class Bucket:
    """Counts one quota as a token bucket that holds ``per_minute`` and gains as much each minute."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: int, now_s: float) -> float:
        """Says how long it takes until ``amount`` may be taken, 0 for now. An amount that is larger than the bucket
        needs a full bucket."""
        missing = min(amount, self.per_minute) - self._filled(now_s)
        return max(0.0, missing) * MINUTE_S / self.per_minute

    def take(self, amount: int, now_s: float) -> None:
        """Takes ``amount`` out of the bucket, which may leave a debt."""
        self._level = self._filled(now_s) - amount
        self._at_s = now_s

    def resized(self, per_minute: int, now_s: float) -> Bucket:
        """Makes a bucket with another rate, from which as much has been spent as from this one."""
        # Without rounding, an error in the last digit of what was spent would count as one more.
        spent = round(self.per_minute - self._filled(now_s), 6)
        other = Bucket(per_minute, now_s)
        other.take(math.ceil(spent), now_s)
        return other

    def _filled(self, now_s: float) -> float:
        gained = max(0.0, now_s - self._at_s) / MINUTE_S * self.per_minute
        return min(float(self.per_minute), self._level + gained)


def used_up(tenant: Tenant, quota: str, wait_ms: int) -> Overloaded:
    """Makes the error of a request that met ``quota``, which is one of QUOTAS."""
    text = f"{quota} of tenant {tenant.name!r} ({getattr(tenant, quota)}) is used up"
    return Overloaded(text, wait_ms, (QuotaViolation(f"{tenant.name}/{quota}", text),))
