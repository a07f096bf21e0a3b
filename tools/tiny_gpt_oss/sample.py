"""What a generated conversation is, before tokenisation: turns, tools, what is trained and what is checked.

Also owns the held-out split: a hash of the content decides, so that no seed can leak a test item into training.
Plain data; no openai-harmony, no torch. Built by the task modules, rendered by `rendering`.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Key = tuple[str, ...]
Split = Literal["train", "heldout"]
EFFORTS = ("low", "medium", "high")
HELD_OUT_ONE_IN = 16


class DataError(Exception):
    """The generator or a data file is not as expected."""


@dataclass(frozen=True)
class Turn:
    """One Harmony message. `values` must appear in a final answer for it to count as right."""

    role: Literal["user", "assistant", "tool"]
    text: str
    channel: str | None = None
    recipient: str | None = None
    author: str | None = None
    is_trained: bool = True
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolSpec:
    """A function tool as the developer message shows it. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Sample:
    """One conversation of one task. `key` names the content that the held-out split is made on."""

    task: str
    key: Key
    effort: str
    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()
    instructions: str | None = None
    date: str | None = None


def is_held_out(key: Key) -> bool:
    """True for about one in sixteen contents, the same ones in every run."""
    digest = hashlib.blake2b("\x1f".join(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def draw(rng: random.Random, split: Split, make: Callable[[random.Random], tuple[Key, T]]) -> tuple[Key, T]:
    """Calls `make` until the key it returns lies in `split`."""
    for _ in range(10_000):
        key, item = make(rng)
        if is_held_out(key) == (split == "heldout"):
            return key, item
    raise DataError(f"no content of split {split!r} found in 10,000 draws: the set is too small for a held-out part")


def user(text: str) -> Turn:
    return Turn("user", text)


def analysis(text: str) -> Turn:
    return Turn("assistant", text, channel="analysis")


def final(text: str, values: tuple[str, ...] = (), *, is_trained: bool = True) -> Turn:
    return Turn("assistant", text, channel="final", values=values, is_trained=is_trained)


def pick_effort(rng: random.Random) -> str:
    return rng.choices(EFFORTS, weights=(4, 4, 3))[0]
