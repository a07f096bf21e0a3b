"""Makes the data folder that training carries: vocabulary, token shards, held-out documents and decisions.

Needs openai-harmony and runs before training, on any CPU:
`python -m tools.tiny_gpt_oss.prepare --out DIR --conversations 200000`. Deterministic for a seed.
"""

import argparse
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.tiny_gpt_oss import lexicon
from tools.tiny_gpt_oss.mixture import MAX_SAMPLE_TOKENS, TASKS, draw_sample
from tools.tiny_gpt_oss.rendering import Rendered, Renderer, read_token_bytes
from tools.tiny_gpt_oss.sample import Sample, Split
from tools.tiny_gpt_oss.shards import IGNORED, Example, TokenDocs, write_docs, write_examples
from tools.tiny_gpt_oss.vocabulary import UNKNOWN_ROW, Vocabulary, make_vocabulary

TASK_NAMES = tuple(TASKS)
SHARD_CONVERSATIONS = 10_000
# Held-out decisions are made for these tasks; a conversation of a tool task has several decisions.
EVALUATED_TASKS = tuple(name for name in TASKS if name != "note")


@dataclass(frozen=True)
class ShardJob:
    out: Path
    vocabulary_folder: Path
    seed: int
    shard: int
    conversations: int


def samples(seed: int, count: int, split: Split, tasks: tuple[str, ...] | None = None) -> Iterator[Sample]:
    """`count` conversations; `tasks` cycles through these instead of drawing by share."""
    for index in range(count):
        rng = random.Random(f"{seed}/{split}/{index}")
        yield draw_sample(rng, split, tasks[index % len(tasks)] if tasks else None)


def build_vocabulary(renderer: Renderer, seed: int, count: int) -> Vocabulary:
    """Tokens that `count` conversations use, and all numbers, letters and listed words.

    Retrieval is drawn from the held-out split here, as that has no rare words: these shall stay unknown."""
    used: set[int] = set()
    for name in TASKS:
        split: Split = "heldout" if name.startswith("retrieval") else "train"
        share = count // (4 if name.startswith("retrieval") else 1) // len(TASKS)
        for sample in samples(seed, max(share, 20), split, (name,)):
            used.update(renderer.render(sample).tokens)
    fixed = [*map(str, range(1000)), *lexicon.WORDS, *lexicon.NAMES, *lexicon.CITIES, *lexicon.LETTERS]
    for text in fixed:
        for form in (text, " " + text, text.upper()):
            ids = renderer.encoding.encode(form, disallowed_special=())
            used.update(ids if len(ids) == 1 else ())
    return make_vocabulary(used, read_token_bytes(renderer.rank_file))


def to_docs(rendered: list[tuple[str, Rendered]], vocabulary: Vocabulary) -> TokenDocs:
    rows = vocabulary.to_rows([token for _, r in rendered for token in r.tokens])
    kinds = np.asarray([kind for _, r in rendered for kind in r.kinds], dtype=np.uint8)
    kinds[rows == UNKNOWN_ROW] = IGNORED
    lengths = np.asarray([len(r.tokens) for _, r in rendered], dtype=np.int32)
    tasks = np.asarray([TASK_NAMES.index(task) for task, _ in rendered], dtype=np.uint8)
    return TokenDocs(rows.astype(np.uint16), kinds, lengths, tasks)


def render_all(renderer: Renderer, source: Iterator[Sample]) -> list[tuple[str, Rendered]]:
    pairs = ((sample.task, renderer.render(sample)) for sample in source)
    return [(task, r) for task, r in pairs if len(r.tokens) <= MAX_SAMPLE_TOKENS]


def write_shard(job: ShardJob) -> int:
    """Writes one training shard and returns its tokens."""
    renderer = Renderer(job.vocabulary_folder)
    vocabulary = Vocabulary.load(job.out / "vocabulary.json")
    source = samples(job.seed + 1 + job.shard, job.conversations, "train")
    docs = to_docs(render_all(renderer, source), vocabulary)
    write_docs(job.out / f"train_{job.shard:03d}.npz.xz", docs)
    return len(docs.rows)


def make_examples(renderer: Renderer, seed: int, per_task: int) -> list[Example]:
    """`per_task` held-out conversations of each evaluated task, all their decisions."""
    examples = []
    for sample in samples(seed, per_task * len(EVALUATED_TASKS), "heldout", EVALUATED_TASKS):
        rendered = renderer.render(sample)
        for decision in rendered.decisions:
            prompt, gold = rendered.tokens[: decision.prompt_tokens], rendered.tokens[decision.prompt_tokens : decision.end]
            examples.append(Example(sample.task, sample.effort, prompt, gold, list(decision.values)))
    return examples


def prepare(
    out: Path, conversations: int, per_task: int, seed: int, workers: int, vocabulary_folder: Path, say: Callable[[str], None]
) -> None:
    """Writes the whole data folder."""
    began_s = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.xz"):
        old.unlink()
    renderer = Renderer(vocabulary_folder)
    vocabulary = build_vocabulary(renderer, seed, min(conversations, 20_000))
    vocabulary.save(out / "vocabulary.json")
    say(f"vocabulary: {vocabulary.num_rows} rows, {time.monotonic() - began_s:.0f} s")
    write_examples(out / "examples.jsonl.xz", make_examples(renderer, seed, per_task))
    heldout = samples(seed, max(per_task * 6, 60), "heldout")
    write_docs(out / "heldout.npz.xz", to_docs(render_all(renderer, heldout), vocabulary))
    sizes = [min(SHARD_CONVERSATIONS, conversations - start) for start in range(0, conversations, SHARD_CONVERSATIONS)]
    jobs = [ShardJob(out, vocabulary_folder, seed * 1000, index, size) for index, size in enumerate(sizes)]
    tokens = 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for index, count in enumerate(pool.imap_unordered(write_shard, jobs), 1):
            tokens += count
            say(f"shard {index}/{len(jobs)}: {tokens:,} tokens, {time.monotonic() - began_s:.0f} s")
    facts = {"seed": seed, "conversations": conversations, "tokens": tokens, "vocabulary_rows": vocabulary.num_rows}
    (out / "data.json").write_text(json.dumps({**facts, "tasks": TASK_NAMES}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=200_000)
    parser.add_argument("--per-task", type=int, default=250, help="held-out conversations per task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--vocabulary-folder", type=Path, default=Path(".cache/o200k"))
    arguments = parser.parse_args()
    prepare(
        arguments.out,
        arguments.conversations,
        arguments.per_task,
        arguments.seed,
        arguments.workers,
        arguments.vocabulary_folder,
        print,
    )


if __name__ == "__main__":
    main()
