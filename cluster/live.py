"""What `tandem top` shows: two scrapes of the whole cluster and what lies between them. Fetching is apart; the arithmetic is pure."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from common import metric_catalog as catalog
from common.errors import WorkerLost
from common.metrics import Definition

TIMEOUT_S = 5.0
Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """All series of all processes, equal ones of several processes summed. `silent`: targets that did not answer."""

    at_s: float
    values: Mapping[tuple[str, Labels], float]
    silent: tuple[str, ...] = ()

    def total(self, name: str, **labels: str) -> float:
        wanted = set(labels.items())
        return sum(value for (n, own), value in self.values.items() if n == name and wanted <= own)

    def names_of(self, definition: Definition, label: str) -> list[str]:
        """Every value of a label, in order."""
        return sorted({v for (n, own), _ in self.values.items() if n == definition.name for k, v in own if k == label})

    def buckets(self, definition: Definition, **labels: str) -> dict[float, float]:
        """Upper bound -> count of all that is not larger."""
        wanted, found = set(labels.items()), dict.fromkeys((*definition.buckets, float("inf")), 0.0)
        for (name, own), value in self.values.items():
            if name == f"{definition.name}_bucket" and wanted <= own:
                bound = float(dict(own)["le"])
                found[bound] = found.get(bound, 0.0) + value
        return found


@dataclass(frozen=True)
class PoolLine:
    pool: str
    role: str
    is_open: bool
    ready: int
    wanted: int
    running: int
    queued: int
    wait_s: float
    kv_used: float | None
    tokens_per_s: float
    p50_s: float | None
    p99_s: float | None
    usd_per_hour: float


@dataclass(frozen=True)
class Overview:
    """Rates and quantiles are of the time between the scrapes; None where nothing happened. `p50_s`, `p99_s` of a pool: one prompt's
    compute in a prefill pool, the gap between tokens in a decode pool."""

    requests_per_s: float
    failed_per_s: float
    running: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    usd_per_hour: float
    usd_per_million_output: float | None
    pools: tuple[PoolLine, ...] = field(default=())


def fetch(controller_metrics: str) -> Scrape:
    """Scrapes everything that the controller at host:port lists. Raises: WorkerLost if the controller itself does not answer"""
    try:
        targets = [t["targets"][0] for t in json.loads(_get(controller_metrics, "/targets"))]
    except (OSError, ValueError) as exc:
        raise WorkerLost(f"no controller serves metrics at {controller_metrics}: {exc}") from exc
    texts, silent = [], []
    for target in targets:
        try:
            texts.append(_get(target, "/metrics"))
        except OSError:
            silent.append(target)
    return scrape_of(texts, time.monotonic(), silent)


def scrape_of(texts: Iterable[str], at_s: float, silent: Iterable[str] = ()) -> Scrape:
    values: dict[tuple[str, Labels], float] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                values[key] = values.get(key, 0.0) + sample.value
    return Scrape(at_s, values, tuple(silent))


def overview(before: Scrape, after: Scrape) -> Overview:
    seconds = max(after.at_s - before.at_s, 1e-6)

    def rate(definition: Definition, **labels: str) -> float:
        return max(0.0, after.total(definition.name, **labels) - before.total(definition.name, **labels)) / seconds

    def between(definition: Definition, q: float, **labels: str) -> float | None:
        earlier = before.buckets(definition, **labels)
        return quantile({b: n - earlier.get(b, 0.0) for b, n in after.buckets(definition, **labels).items()}, q)

    price, output = after.total(catalog.POOL_PRICE.name), rate(catalog.OUTPUT_TOKENS)
    pools = []
    roles = {(dict(own)["role"], dict(own)["pool"]) for (n, own), _ in after.values.items() if n == catalog.GROUPS.name}
    for role, pool in sorted(roles, reverse=True):
        timed = catalog.PREFILL_SECONDS if role == "prefill" else catalog.ITL
        used, free = (after.total(catalog.KV_BLOCKS.name, pool=pool, kind="full", state=s) for s in ("used", "free"))
        line = PoolLine(
            pool=pool,
            role=role,
            is_open=after.total(catalog.POOL_OPEN.name, pool=pool) > 0,
            ready=int(after.total(catalog.GROUPS.name, pool=pool, state="ready")),
            wanted=int(after.total(catalog.WANTED_GROUPS.name, pool=pool)),
            running=int(after.total(catalog.GROUP_RUNNING.name, pool=pool)),
            queued=int(after.total(catalog.QUEUED.name, pool=pool)),
            wait_s=after.total(catalog.PREDICTED_WAIT.name, pool=pool),
            kv_used=used / (used + free) if used + free else None,
            tokens_per_s=rate(catalog.PREFILL_TOKENS if role == "prefill" else catalog.DECODE_TOKENS, pool=pool),
            p50_s=between(timed, 0.5, pool=pool),
            p99_s=between(timed, 0.99, pool=pool),
            usd_per_hour=after.total(catalog.POOL_PRICE.name, pool=pool),
        )
        pools.append(line)
    return Overview(
        requests_per_s=rate(catalog.REQUESTS),
        failed_per_s=rate(catalog.REQUESTS, outcome="failed"),
        running=int(after.total(catalog.RUNNING.name)),
        output_tokens_per_s=output,
        ttft_p50_s=between(catalog.TTFT, 0.5),
        ttft_p99_s=between(catalog.TTFT, 0.99),
        itl_p50_s=between(catalog.ITL, 0.5),
        itl_p99_s=between(catalog.ITL, 0.99),
        usd_per_hour=price,
        usd_per_million_output=price / 3600 / output * 1e6 if output else None,
        pools=tuple(pools),
    )


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """As Prometheus does: linear within the bucket; the last bound if it lies beyond. None without observations."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    rank, lower, seen = q * total, 0.0, 0.0
    for bound in bounds[:-1]:
        if buckets[bound] >= rank:
            inside = buckets[bound] - seen
            return bound if inside <= 0 else lower + (bound - lower) * (rank - seen) / inside
        lower, seen = bound, buckets[bound]
    return bounds[-2]


def _get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=TIMEOUT_S) as answer:
        return answer.read().decode()
