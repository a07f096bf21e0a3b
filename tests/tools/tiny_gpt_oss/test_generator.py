"""The data generator: deterministic, strictly parseable, with a held-out part that training never sees."""

import random
from itertools import islice
from pathlib import Path

import pytest
from openai_harmony import RenderConversationConfig, Role

from tools.tiny_gpt_oss.grading import grade, parse_completion
from tools.tiny_gpt_oss.mixture import MAX_SAMPLE_TOKENS, TASKS, draw_sample
from tools.tiny_gpt_oss.prepare import make_examples, samples
from tools.tiny_gpt_oss.rendering import CALL, RETURN, TARGET, Renderer
from tools.tiny_gpt_oss.sample import is_held_out

WITHOUT_HELD_OUT_PART = ("chat", "capital", "spell")
SHORT_TASKS = tuple(name for name in TASKS if name != "retrieval_1000_3000")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(Path(tmp_path_factory.mktemp("vocabulary")))


def test_same_seed_gives_same_tokens(renderer: Renderer) -> None:
    first, second = ([renderer.render(s).tokens for s in samples(7, 40, "train")] for _ in range(2))
    other = [renderer.render(s).tokens for s in samples(8, 40, "train")]
    assert first == second
    assert first != other


@pytest.mark.parametrize("task", TASKS)
def test_every_decision_parses_strictly_and_stops_right(renderer: Renderer, task: str) -> None:
    for sample in samples(3, 12, "train", (task,)):
        rendered = renderer.render(sample)
        assert len(rendered.tokens) <= MAX_SAMPLE_TOKENS
        assert rendered.decisions
        for decision in rendered.decisions:
            gold = rendered.tokens[decision.prompt_tokens : decision.end]
            messages = renderer.encoding.parse_messages_from_completion_tokens(gold, Role.ASSISTANT, strict=True)
            parts = parse_completion(renderer.encoding.decode(gold))
            assert [m.content[0].text for m in messages] == [p.text for p in parts]
            assert [m.recipient for m in messages] == [p.recipient for p in parts]
            assert gold[-1] == (CALL if messages[-1].recipient else RETURN)


def test_rendering_equals_the_librarys_whole_conversation(renderer: Renderer) -> None:
    config = RenderConversationConfig(auto_drop_analysis=False)
    for sample in samples(5, 60, "train", SHORT_TASKS):
        whole = renderer.encoding.render_conversation_for_training(renderer.conversation(sample), config)
        assert renderer.render(sample).tokens == whole


def test_targets_are_exactly_what_the_model_writes(renderer: Renderer) -> None:
    for sample in samples(6, 26, "train", SHORT_TASKS):
        rendered = renderer.render(sample)
        last = rendered.decisions[-1]
        inside = range(last.prompt_tokens, last.end)
        assert all(rendered.kinds[i] == TARGET for i in inside)
        assert all(rendered.kinds[d.prompt_tokens - 1] != TARGET for d in rendered.decisions)


@pytest.mark.parametrize("task", TASKS)
def test_split_is_by_content(task: str) -> None:
    for split in ("train", "heldout"):
        for sample in samples(4, 15, split, (task,)):
            if sample.key[0] not in WITHOUT_HELD_OUT_PART:
                assert is_held_out(sample.key) == (split == "heldout")


def test_training_facts_are_never_held_out() -> None:
    asked = [s for s in samples(9, 40, "train", ("retrieval_near",))]
    assert not any(is_held_out(s.key) for s in asked)


def test_reasoning_effort_sets_the_length_of_the_analysis() -> None:
    lengths: dict[str, list[int]] = {"low": [], "medium": [], "high": []}
    rng = random.Random(1)
    for sample in (draw_sample(rng, "train", "arithmetic") for _ in range(200)):
        lengths[sample.effort].append(sum(len(t.text) for t in sample.turns if t.channel == "analysis"))
    mean = {effort: sum(v) / len(v) for effort, v in lengths.items()}
    assert mean["low"] * 2 < mean["medium"] < mean["high"]


def test_retrieval_distances_fill_their_buckets(renderer: Renderer) -> None:
    for task, low, high in (("retrieval_200_1000", 200, 1100), ("retrieval_1000_3000", 1000, 3400)):
        for sample in islice(samples(2, 6, "heldout", (task,)), 6):
            prompt = renderer.encoding.decode(renderer.render(sample).tokens[: renderer.render(sample).decisions[0].prompt_tokens])
            _, attribute, name, value = sample.key
            after = prompt.partition(f"The {attribute} of {name} is {value}.")[2]
            assert low <= len(renderer.encoding.encode(after, disallowed_special=())) <= high


def test_gold_answers_get_full_marks_and_damaged_ones_do_not(renderer: Renderer) -> None:
    for example in make_examples(renderer, seed=11, per_task=2):
        gold = renderer.encoding.decode(example.gold)
        good = grade(example.task, gold, example.values, gold)
        assert (good.is_well_formed, good.is_right) == (True, True)
        cut = grade(example.task, gold, example.values, renderer.encoding.decode(example.gold[:-1]))
        assert (cut.is_well_formed, cut.is_right) == (False, False)
        wrong = grade(example.task, gold, example.values, "<|channel|>final<|message|>zzz<|return|>")
        assert (wrong.is_well_formed, wrong.is_right) == (True, False)
