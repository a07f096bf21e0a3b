"""Describes each pool to the choice: how long until a group is free, what a step takes, whether there is room, and why it is out.

Reads pools and links, changes nothing. Called by `dispatch.py` for every choice, so it is kept lean.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.cost_model import PairLoad, PoolSpec, Shape, itl_ms, prefill_ms
from cluster.router.choice import DecodeOffer, Exclusion, Out, PrefillOffer, spread
from cluster.router.decode_link import DecodeLink
from cluster.router.pool import DecodePool, PrefillPool

IDLE_ROOM_WAIT_MS = 50.0  # least wait that is expected at a pool without room


def prefill_offers(
    pools: Iterable[PrefillPool], shape: Shape, now_s: float, priority: int = 0, avoid: frozenset[int] = frozenset()
) -> list[PrefillOffer]:
    """What each pool offers a request of this shape. `avoid`: incarnations that must not be counted on."""
    return [_prefill_offer(pool, shape, priority, avoid, now_s) for pool in pools]


def _prefill_offer(pool: PrefillPool, shape: Shape, priority: int, avoid: frozenset[int], now_s: float) -> PrefillOffer:
    links = _without(pool.healthy(), avoid)
    took = prefill_ms(pool.prepared, shape.prompt, pool.correction.factor(shape.prompt, now_s))
    out = pool.exclusion(links)
    if out is not None:
        return PrefillOffer(pool.prepared, "", 0.0, pool.dispatch.ms, took, out)
    busy = [link.busy_ms(now_s) for link in links]
    wait = pool.wait_ms(busy, priority)
    if shape.prompt > pool.spec.longest_tokens:
        out = Exclusion(Out.TOO_LONG, f"{pool.spec.name} takes at most {pool.spec.longest_tokens} tokens")
    elif refusal := pool.queue.refusal(shape.prompt, wait):
        out = Exclusion(Out.FULL, f"{pool.spec.name}: {refusal}")
    return PrefillOffer(pool.prepared, links[busy.index(min(busy))].name, wait, pool.dispatch.ms, took, out)


def decode_offers(
    pools: Iterable[DecodePool], shape: Shape, now_s: float, seed: int = 0, avoid: frozenset[int] = frozenset()
) -> list[DecodeOffer]:
    """As `prefill_offers`; the seed says which of several equal groups stands for its pool."""
    return [_decode_offer(pool, shape, seed, avoid, now_s) for pool in pools]


def _decode_offer(pool: DecodePool, shape: Shape, seed: int, avoid: frozenset[int], now_s: float) -> DecodeOffer:
    links = _without(pool.healthy(), avoid)
    spec = pool.spec
    out = pool.exclusion(links)
    if out is None and shape.worst > spec.longest_tokens:
        out = Exclusion(Out.TOO_LONG, f"{spec.name} holds at most {spec.longest_tokens} tokens")
    if out is not None:
        return DecodeOffer(pool.prepared, "", 0.0, out=out)
    room, batch, context, link = min(ranks(spec, links, shape, seed), key=_rank_key)
    share = len(pool.expected) / len(links)
    load = PairLoad(batch=batch + share, context_tokens=context + sum(pool.expected.values()) / len(links))
    itl_factor = pool.itl.factor(now_s)
    step = itl_ms(pool.prepared, load, shape, itl_factor)
    wait = 0.0
    if pool.front is not None or not room:
        wait = max(IDLE_ROOM_WAIT_MS, step * shape.output * (share + 1) / max(batch, 1))
    return DecodeOffer(pool.prepared, link.name, step, wait, itl_factor, pool.transfer.factor(now_s))


Rank = tuple[bool, int, float, DecodeLink]  # has room, batch, context tokens


def ranks(spec: PoolSpec, links: list[DecodeLink], shape: Shape, seed: int) -> list[Rank]:
    """The links of a pool with what they are ranked by, turned by the seed so that equals take turns."""
    blocks = spec.kv.blocks_for(shape.worst) if spec.kv is not None else 0
    shift = spread(seed, len(links)) if links else 0
    found = []
    for link in links[shift:] + links[:shift]:
        batch = link.batch()
        found.append((link.has_room(blocks, batch), batch, link.context_tokens(), link))
    return found


def rank_decode(spec: PoolSpec, links: list[DecodeLink], shape: Shape, seed: int) -> list[DecodeLink]:
    """Groups with room first, then the least loaded; equals by the seed."""
    return [rank[3] for rank in sorted(ranks(spec, links, shape, seed), key=_rank_key)]


def _rank_key(rank: Rank) -> tuple[bool, int, float]:
    return (not rank[0], rank[1], rank[2])


def _without(links: list, avoid: frozenset[int]) -> list:
    return [link for link in links if link.description.incarnation not in avoid] if avoid else links
