"""What one answer has under way at each component, as a part of its gateway's load."""

from __future__ import annotations

from pillion.gateway.links.load_exchange import OwnLoad
from pillion.gateway.planning.planner import RequestPlan


class AssignedLoad:
    """One answer's share of its gateway's ``load``, which the planner reads."""

    def __init__(self, load: OwnLoad) -> None:
        self._load = load
        # By component: streams or tokens, and prompt tokens that are yet to be computed there.
        self._assigned: dict[str, tuple[int, int]] = {}

    def assign(self, amounts: dict[str, tuple[int, int]]) -> None:
        """Replaces this answer's share of each component (OwnLoad.add)."""
        for component_id in {**self._assigned, **amounts}:
            before, now = (owner.get(component_id, (0, 0)) for owner in (self._assigned, amounts))
            if before != now:
                self._load.add(component_id, now[0] - before[0], now[1] - before[1])
        self._assigned = amounts

    def assign_plan(self, plan: RequestPlan, done_tokens: int = 0) -> None:
        """Replaces it by what a plan gives to its workers. ``done_tokens``: as far as its span has been
        acknowledged."""
        amounts = {plan.decode.component_id: (1, plan.prompt_tokens - plan.split_tokens)}
        if plan.prefill is not None and plan.chunks:
            left = max(0, plan.split_tokens - max(done_tokens, plan.cached_tokens))
            amounts[plan.prefill.component_id] = left, left
        self.assign(amounts)
