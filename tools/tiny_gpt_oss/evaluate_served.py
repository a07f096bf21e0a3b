"""The held-out decisions asked of a running router: the model card's table for what is really served.

Greedy, many at once, graded by the same rules as `evaluate`. With `--reference FOLDER` each answer is also compared, token by token,
with `transformers` in fp32 on that checkpoint. Run it on a cluster that serves the expanded model:
`python -m tools.tiny_gpt_oss.evaluate_served --router HOST:PORT --data DIR --out FILE --name served_mxfp4`.
"""

import argparse
import asyncio
import json
from pathlib import Path

import grpc
from rich.progress import Progress

from common.proto import router_pb2, router_pb2_grpc
from tools.tiny_gpt_oss.evaluate import GOALS, Answer, print_table, tabulate
from tools.tiny_gpt_oss.grading import grade
from tools.tiny_gpt_oss.shards import Example, read_examples
from tools.tiny_gpt_oss.vocabulary import Vocabulary

SPARE_TOKENS = 24
TIMEOUT_S = 600


def pick(examples: list[Example], per_task: int) -> list[Example]:
    """The first `per_task` of each task."""
    taken: dict[str, int] = {}
    chosen = []
    for example in examples:
        taken[example.task] = taken.get(example.task, 0) + 1
        if taken[example.task] <= per_task:
            chosen.append(example)
    return chosen


async def ask_all(router: str, examples: list[Example], at_once: int) -> list[list[int]]:
    """Output tokens of each example, in order. Raises: grpc.aio.AioRpcError as soon as one fails."""
    gate = asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        with Progress() as bar:
            task = bar.add_task("asking", total=len(examples))

            async def ask(example: Example) -> list[int]:
                request = router_pb2.GenerateRequest(request_id=example.task)
                request.tokenized.input_ids.extend(int(token) for token in example.prompt)
                request.sampling_params.temperature = 0.0
                request.sampling_params.max_tokens = len(example.gold) + SPARE_TOKENS
                async with gate:
                    tokens: list[int] = []
                    async for response in stub.Generate(request, timeout=TIMEOUT_S):
                        tokens += response.chunk.token_ids
                bar.advance(task)
                return tokens

            return await asyncio.gather(*(ask(example) for example in examples))


def grade_all(examples: list[Example], outputs: list[list[int]], vocabulary: Vocabulary) -> list[Answer]:
    answers = []
    for example, tokens in zip(examples, outputs, strict=True):
        gold, text = vocabulary.decode(vocabulary.to_rows(example.gold)), vocabulary.decode(vocabulary.to_rows(tokens))
        answers.append(Answer(example, gold, text, grade(example.task, gold, example.values, text)))
    return answers


def agreement(folder: Path, examples: list[Example], outputs: list[list[int]]) -> dict[str, float]:
    """Share of served tokens that transformers chooses too, given the same tokens before them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    equal = total = 0
    with Progress() as bar, torch.no_grad():
        for example, tokens in bar.track(list(zip(examples, outputs, strict=True)), description="transformers"):
            ids = torch.tensor([[int(t) for t in example.prompt] + tokens])
            logits = model(ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1]
            equal += int((logits.argmax(-1) == ids[0, -len(tokens) :]).sum())
            total += len(tokens)
    return {"right": equal, "total": total, "share": equal / total}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON; tables of other names in it are kept")
    parser.add_argument("--name", required=True, help="name of this table, e.g. served_mxfp4")
    parser.add_argument("--per-task", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=32, help="requests under way")
    parser.add_argument("--task", action="append", help="only these tasks; may be given several times")
    parser.add_argument("--reference", type=Path, help="checkpoint folder to compare with transformers on")
    given = parser.parse_args()
    vocabulary = Vocabulary.load(given.data / "vocabulary.json")
    examples = pick(read_examples(given.data / "examples.jsonl.xz"), given.per_task)
    if given.task:
        examples = [example for example in examples if example.task in given.task]
    outputs = asyncio.run(ask_all(given.router, examples, given.at_once))
    table = tabulate(grade_all(examples, outputs, vocabulary))
    if given.reference is not None:
        table["same_token_as_transformers"] = agreement(given.reference, examples, outputs)
    results = json.loads(given.out.read_text()) if given.out.exists() else {"goals": GOALS, "tables": {}}
    results["tables"][given.name] = table
    given.out.write_text(json.dumps(results, indent=1) + "\n")
    print_table({given.name: table})


if __name__ == "__main__":
    main()
