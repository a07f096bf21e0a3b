"""Which tasks a conversation is drawn from, how often, and what surrounds it (history, unrelated tools, date).

`draw_sample` is the whole generator for one random state. Called by `prepare` and the tests.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from tools.tiny_gpt_oss.sample import Sample, Split, Turn
from tools.tiny_gpt_oss.task_arithmetic import make_arithmetic
from tools.tiny_gpt_oss.task_chat import make_chat, make_refusal, make_unknown
from tools.tiny_gpt_oss.task_retrieval import make_note, make_retrieval
from tools.tiny_gpt_oss.task_text import make_text
from tools.tiny_gpt_oss.task_tools import make_no_tool, make_tool_session, make_tool_use, make_two_tools, offer_unrelated

MAX_SAMPLE_TOKENS = 4096
INSTRUCTIONS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Be polite.",
    "Use the tools when they fit.",
    "Help the user.",
)


def count_words(text: str) -> int:
    """About the number of tokens of filler text: its words are single tokens, and so is the full stop."""
    return len(text.split()) + 1


def _retrieval(low_tokens: int, high_tokens: int) -> Callable[[random.Random, Split], Sample]:
    def make(rng: random.Random, split: Split) -> Sample:
        rare_share = 0.1 if split == "train" and rng.random() < 0.3 else 0.0
        return make_retrieval(rng, split, rng.randint(low_tokens, high_tokens), count_words, rare_share)

    return make


# Task -> (share of the conversations, maker).
TASKS: dict[str, tuple[float, Callable[[random.Random, Split], Sample]]] = {
    "arithmetic": (0.20, make_arithmetic),
    "tool": (0.15, make_tool_use),
    "two_tools": (0.08, make_two_tools),
    "tool_session": (0.04, make_tool_session),
    "no_tool": (0.03, make_no_tool),
    "text": (0.14, make_text),
    "chat": (0.07, make_chat),
    "refusal": (0.03, make_refusal),
    "unknown": (0.03, make_unknown),
    "note": (0.02, make_note),
    "retrieval_near": (0.08, _retrieval(0, 199)),
    "retrieval_200_1000": (0.08, _retrieval(200, 980)),
    "retrieval_1000_3000": (0.05, _retrieval(1000, 2950)),
}
_HISTORY_MAKERS = (make_arithmetic, make_text, make_chat, make_note)


def draw_sample(rng: random.Random, split: Split, task: str | None = None) -> Sample:
    """One conversation; `task` None draws it by the shares above."""
    name = task or rng.choices(list(TASKS), weights=[share for share, _ in TASKS.values()])[0]
    sample = TASKS[name][1](rng, split)
    if name in ("arithmetic", "text", "chat", "refusal", "unknown", "tool") and rng.random() < 0.2:
        sample = replace(sample, turns=(*_history(rng), *sample.turns))
    if not sample.tools and name != "no_tool" and rng.random() < 0.15:
        sample = replace(sample, tools=offer_unrelated(rng))
    instructions = rng.choice(INSTRUCTIONS) if rng.random() < 0.3 else None
    date = f"20{rng.randint(24, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}" if rng.random() < 0.6 else None
    return replace(sample, instructions=instructions, date=date)


def _history(rng: random.Random) -> list[Turn]:
    """One or two earlier exchanges, question and final answer only, not trained on."""
    turns: list[Turn] = []
    for _ in range(rng.randint(1, 2)):
        earlier = rng.choice(_HISTORY_MAKERS)(rng, "train")
        turns += [replace(t, is_trained=False) for t in earlier.turns if t.channel != "analysis"]
    return turns
