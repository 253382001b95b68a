"""The workers that one request is planned with, where there are very many: a bounded number, which take turns (I9)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from pillion.wire.registry import ComponentRecord

# Most workers of a role that one request is planned with. Of more, half are those beside most of its prompt; the others
# take turns, so that several gateways do not all find the same least loaded one in their heartbeats.
MAX_CANDIDATES = 32
# Of more, so many may be chosen because they have the request's adapter.
MAX_READY = 8
# Between the first ones of two requests' turns: prime, so that all numbers of workers are gone through.
TURN = 7919


def choose_workers(
    everyone: Sequence[ComponentRecord],
    beside: Callable[[], Iterable[ComponentRecord]],
    spread: int,
    fits: Callable[[ComponentRecord], bool],
    is_ready: Callable[[ComponentRecord], bool] | None = None,
) -> list[ComponentRecord]:
    """Fit workers of a role: all, or of many those ``beside`` most of the prompt, those that have its adapter, and
    those whose turn it is.

    Args:
        everyone: all workers of the role and model, in an order that stays.
        beside: returns those of them on the nodes that have most of the prompt, the best node's first.
        spread: any number that differs from request to request.
        fits: whether a worker can serve the request now.
        is_ready: whether a worker has the request's adapter; None where the request has none.
    """
    workers: Iterable[ComponentRecord] = everyone
    if len(everyone) > MAX_CANDIDATES:
        first = spread * TURN % len(everyone)
        turned = [*everyone[first:], *everyone[:first]]
        ready = filter(is_ready, turned) if is_ready is not None else iter(())
        workers = itertools.chain(
            itertools.islice(beside(), MAX_CANDIDATES // 2), itertools.islice(ready, MAX_READY), turned
        )
    chosen: dict[str, ComponentRecord] = {}
    for worker in workers:
        if worker.component_id not in chosen and fits(worker):
            chosen[worker.component_id] = worker
            if len(chosen) == MAX_CANDIDATES:
                break
    return list(chosen.values())


def choose_by_hits(
    choose: Callable[[str, Sequence[str]], list[ComponentRecord]], hits: Mapping[str, int], spread: int
) -> tuple[list[ComponentRecord], list[ComponentRecord], list[str]]:
    """Decode workers, prefill workers beside them, and the nodes of both and of what is cached; nothing where no decode
    worker fits.

    Args:
        choose: returns fit workers of a role, those on the given nodes before others (:func:`choose_workers`).
        hits: blocks of the prompt on each node, by node id.
        spread: any number that differs from request to request.
    """
    names = sorted(hits)
    first = spread % len(names) if names else 0
    # The nodes that have the most come first; equals take turns.
    best = sorted((*names[first:], *names[:first]), key=lambda node_id: -hits[node_id])
    decodes = choose("decode", best)
    if not decodes:
        return [], [], []
    near = list(dict.fromkeys(one.node_id for one in decodes))
    prefills = choose("prefill", near)
    return decodes, prefills, list(dict.fromkeys((*near, *(one.node_id for one in prefills), *best)))
