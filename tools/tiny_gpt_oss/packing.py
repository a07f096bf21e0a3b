"""Packs whole conversations end to end into rows of a fixed number of tokens, in a background thread.

Owns the order of the data and the per-token targets; no torch compute. Called by `train`.
"""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tools.tiny_gpt_oss.shards import IGNORED, TokenDocs


@dataclass(frozen=True)
class PackedRow:
    """One row, arrays [T] but `tasks` [documents]: what to read, what comes next, of which kind, where.

    `documents` rises from 0; the last document may be padding, with task -1.
    """

    rows: np.ndarray
    targets: np.ndarray
    kinds: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    tasks: np.ndarray


def pack_row(docs: TokenDocs, starts: np.ndarray, chosen: list[int], tokens: int) -> PackedRow:
    lengths = docs.lengths[chosen].astype(np.int64)
    tasks = docs.tasks[chosen].astype(np.int64)
    rows = np.concatenate([docs.rows[starts[i] : starts[i] + docs.lengths[i]] for i in chosen]).astype(np.int64)
    kinds = np.concatenate([docs.kinds[starts[i] : starts[i] + docs.lengths[i]] for i in chosen])
    padding = tokens - len(rows)
    if padding:
        rows = np.concatenate([rows, np.zeros(padding, dtype=np.int64)])
        kinds = np.concatenate([kinds, np.full(padding, IGNORED, dtype=kinds.dtype)])
        lengths, tasks = np.append(lengths, padding), np.append(tasks, -1)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    first = np.cumsum(lengths) - lengths
    positions = np.arange(tokens) - np.repeat(first, lengths)
    next_kinds = np.append(kinds[1:], IGNORED)
    next_kinds[np.cumsum(lengths) - 1] = IGNORED
    return PackedRow(rows, np.append(rows[1:], 0), next_kinds, documents, positions, tasks)


def packed_rows(docs: TokenDocs, tokens: int, seed: int, *, is_endless: bool) -> Iterator[PackedRow]:
    """Rows of shuffled conversations; one that no longer fits opens the next row, one longer than a row is left out."""
    rng = np.random.default_rng(seed)
    starts = docs.starts
    chosen: list[int] = []
    used = 0
    while True:
        for index in rng.permutation(len(docs.lengths)).tolist():
            length = int(docs.lengths[index])
            if length > tokens:
                continue
            if used + length > tokens:
                yield pack_row(docs, starts, chosen, tokens)
                chosen, used = [], 0
            chosen.append(index)
            used += length
        if not is_endless:
            yield pack_row(docs, starts, chosen, tokens)
            return


def prefetch(source: Iterator[PackedRow], depth: int = 8) -> Iterator[PackedRow]:
    """The same rows, made ahead by a daemon thread."""
    ready: queue.Queue[PackedRow] = queue.Queue(depth)

    def work() -> None:
        for row in source:
            ready.put(row)

    threading.Thread(target=work, name="pack", daemon=True).start()
    while True:
        yield ready.get()
