"""Says what each tenant may use, and how its cache is kept apart. Sans-IO (I9).

API key --keyring--> tenant --> salt of every block hash, priority cap, quotas, bounds, weight in all queues
no keyring ---------> OPEN: one tenant for everybody, nothing bounded but the gateway itself
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from pillion.priority import MAX_PRIORITY, NO_FLOW, Flow

# A tenant without bounds of its own may fill this share of what the other tenants leave of the gateway's bounds. Where
# n tenants flood the gateway, each gets 1/(n+1) of it, and as much stays free for the next one: this is the dynamic
# threshold of Choudhury and Hahne ("Dynamic queue length thresholds for shared-memory packet switches", 1998).
TENANT_SHARE = 0.5
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
        max_pinned_tokens: the tokens that it may have pinned at each KV node, below --max-tenant-pinned-percent of the
            pool.
        cache_group: tenants of one group share KV; "" shares with nobody.
        operator: whether it may see the whole cluster (GetStatus), and load and unload adapters.
        models: the names of the models and adapters that it may use; empty for all.
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

    def may_use(self, name: str) -> bool:
        """Returns whether the tenant may use the model, or the adapter, of this name."""
        return not self.models or name in self.models

    def capped(self, priority: int) -> int:
        """Returns the priority that a request of this tenant gets where it asks for ``priority``."""
        return max(priority, self.most_urgent_priority)

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
