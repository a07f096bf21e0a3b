"""Feeds random and mutated Harmony sequences to the parser and checks what must hold for every one of them.

Run in the default tests with a small number; for a long run:
    python -m tests.frontend.support.fuzz --sequences 2000000 --processes 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence

from frontend.chat_format import FinishReason
from frontend.harmony import tokens
from frontend.harmony.parse import HarmonyReplyParser
from frontend.vocab import NUM_ORDINARY_TOKENS, Vocabulary, load_vocabulary
from tests.frontend.support.replies import Reply, read
from tests.frontend.support.sequences import PAYLOAD, TOOLS, Sampler

CHUNKS = (1, 2, 7)
# Only these repairs may drop words that are no header words; a loss without one of them is a silent loss.
DROPPING = frozenset(
    {
        *("header_words", "call_words", "channel_spelling", "unknown_channel", "duplicate_channel", "duplicate_recipient"),
        *("unknown_role", "foreign_role", "unknown_content_type", "call_without_tools", "cut_header"),
    }
)
_VISIBLE = tuple(word.strip() for word in PAYLOAD if word.strip() not in ("", '"'))


def check_sequence(vocabulary: Vocabulary, ids: Sequence[int], tool_names: frozenset[str] | None, reason: FinishReason) -> Reply:
    """Raises AssertionError if a rule is broken: same result for every chunking, no marker, no silent loss."""
    replies = [read(HarmonyReplyParser(vocabulary.token_bytes, tool_names=tool_names), ids, chunk=chunk, reason=reason) for chunk in CHUNKS]
    first = replies[0]
    assert all(reply == first for reply in replies), "the chunking changes the reply"
    assert "<|" not in first.text, "marker text in the reply"
    assert first.finish is not None
    is_missing = bool(ids) and not first.content and not first.calls
    assert first.finish.is_content_missing == is_missing, "missing content is not flagged"
    check_no_silent_loss(vocabulary, ids, first)
    return first


def check_no_silent_loss(vocabulary: Vocabulary, ids: Sequence[int], reply: Reply) -> None:
    assert reply.finish is not None
    if DROPPING & set(reply.finish.repairs):
        return
    ends = [i for i, token in enumerate(ids) if token in tokens.REPLY_ENDS]
    heard = ids[: ends[0]] if ends else ids
    raw = b"".join(vocabulary.token_bytes[i] if 0 <= i < NUM_ORDINARY_TOKENS else b" " for i in heard)
    said = raw.decode("utf-8", "replace")
    for word in _VISIBLE:
        names = sum(name.count(word) for name, _ in reply.calls)
        assert reply.text.count(word) + names >= said.count(word), f"{word!r} is lost, repairs {reply.finish.repairs}"


def run(sequences: int, seed: int, vocabulary: Vocabulary) -> Counter[str]:
    """Checks that many sequences; returns how often each repair was made. Raises AssertionError naming the input."""
    sampler = Sampler(vocabulary, random.Random(seed))
    repairs: Counter[str] = Counter()
    makers = (sampler.mutated, sampler.mutated, sampler.mutated, sampler.soup)
    offers = (None, frozenset(TOOLS), frozenset[str]())
    for number in range(sequences):
        ids = makers[number % len(makers)]()
        offered = offers[number % len(offers)]
        reason: FinishReason = "length" if sampler.random.random() < 0.2 else "stop"
        try:
            reply = check_sequence(vocabulary, ids, offered, reason)
        except Exception as exc:
            raise AssertionError(f"ids {ids}, tools {offered}, reason {reason}: {exc!r}") from exc
        assert reply.finish is not None
        repairs.update(reply.finish.repairs)
    return repairs


def _run_share(share: tuple[int, int]) -> Counter[str]:
    return run(share[0], share[1], load_vocabulary())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sequences", type=int, default=2_000_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--processes", type=int, default=1)
    chosen = options.parse_args()
    shares = [(chosen.sequences // chosen.processes, chosen.seed + n) for n in range(chosen.processes)]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        repairs = sum(pool.map(_run_share, shares), Counter())
    elapsed_s = time.monotonic() - started
    sys.stdout.write(f"{sum(n for n, _ in shares)} sequences in {elapsed_s:.0f} s, no rule broken; repairs: {dict(repairs)}\n")


if __name__ == "__main__":
    main()
