"""Instruments of one process and their Prometheus text. What each metric means is in `metric_catalog.py`.

Not prometheus_client's own instruments: those take a lock and walk their buckets per observation, and can't record one value for a whole
batch. Each instrument is updated by one thread; `Metrics.render` may run in any other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Kind = Literal["counter", "gauge", "histogram"]
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


@dataclass(frozen=True)
class Definition:
    """One metric as scraped. `labels`: names, each with few possible values; `buckets`: upper bounds of a histogram, without +Inf."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Value:
    """A counter or gauge with its labels filled in."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.value += by

    def dec(self, by: float = 1.0) -> None:
        self.value -= by

    def set(self, value: float) -> None:
        self.value = value


class Distribution:
    """A histogram with its labels filled in."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`times`: how many equal observations this stands for, such as the sequences of one step."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class Counter:
    """Of a counter or gauge: one `Value` per combination of labels. Without labels it is that value itself."""

    def __init__(self, definition: Definition):
        self.definition = definition
        self._children: dict[tuple[str, ...], Value] = {} if definition.labels else {(): Value()}

    def labels(self, *values: str) -> Value:
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self.definition.labels), f"{self.definition.name} has labels {self.definition.labels}"
            child = self._children[values] = Value()
        return child

    def inc(self, by: float = 1.0) -> None:
        self._children[()].inc(by)

    def dec(self, by: float = 1.0) -> None:
        self._children[()].dec(by)

    def set(self, value: float) -> None:
        self._children[()].set(value)

    def replace(self, values: Mapping[Any, float]) -> None:
        """Of a gauge: these combinations of labels (tuples) and no others from now on."""
        children = {}
        for labels, value in values.items():
            child = children[labels] = Value()
            child.set(value)
        self._children = children

    def collect(self) -> Metric:
        d = self.definition
        family = (
            CounterMetricFamily(d.name, d.help, labels=d.labels)
            if d.kind == "counter"
            else GaugeMetricFamily(d.name, d.help, labels=d.labels)
        )
        for labels, child in list(self._children.items()):
            family.add_metric(labels, child.value)
        return family


class Histogram:
    """One `Distribution` per combination of labels. Without labels it is that distribution itself."""

    def __init__(self, definition: Definition):
        self.definition = definition
        self._children: dict[tuple[str, ...], Distribution] = {} if definition.labels else {(): Distribution(definition.buckets)}

    def labels(self, *values: str) -> Distribution:
        child = self._children.get(values)
        if child is None:
            assert len(values) == len(self.definition.labels), f"{self.definition.name} has labels {self.definition.labels}"
            child = self._children[values] = Distribution(self.definition.buckets)
        return child

    def observe(self, value: float, times: int = 1) -> None:
        self._children[()].observe(value, times)

    def collect(self) -> Metric:
        d = self.definition
        family = HistogramMetricFamily(d.name, d.help, labels=d.labels)
        bounds = [*map(str, d.buckets), "+Inf"]
        for labels, child in list(self._children.items()):
            family.add_metric(labels, list(zip(bounds, accumulate(child.counts), strict=True)), child.total)
        return family


class Metrics:
    """The instruments of one process, made from its part of the catalog, in a registry of their own."""

    def __init__(self, definitions: Iterable[Definition]):
        self._instruments: dict[str, Counter | Histogram] = {
            d.name: Histogram(d) if d.kind == "histogram" else Counter(d) for d in definitions
        }
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]
        prometheus_client.ProcessCollector(registry=self._registry)

    def counter(self, definition: Definition) -> Counter:
        """The counter or gauge with this definition, which must be among this process's."""
        instrument = self._instruments[definition.name]
        assert isinstance(instrument, Counter)
        return instrument

    def histogram(self, definition: Definition) -> Histogram:
        instrument = self._instruments[definition.name]
        assert isinstance(instrument, Histogram)
        return instrument

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client's registry asks for."""
        for instrument in self._instruments.values():
            yield instrument.collect()

    def render(self) -> bytes:
        """The text that a scrape gets."""
        return prometheus_client.generate_latest(self._registry)
