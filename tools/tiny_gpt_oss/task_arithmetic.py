"""Two-digit addition and subtraction, worked digit by digit in the analysis channel.

A two-digit number is one token, so the steps split it into digits: that is what carries over to unseen pairs.
The reasoning effort sets the length of the steps. Called by `mixture`.
"""

import random

from tools.tiny_gpt_oss.lexicon import COUNTABLE_FOODS, NAMES
from tools.tiny_gpt_oss.sample import Sample, Split, analysis, draw, final, pick_effort, user


def addition_steps(a: int, b: int, effort: str) -> str:
    a1, a0, b1, b0 = a // 10, a % 10, b // 10, b % 10
    ones = a0 + b0
    carry = ones // 10
    tens = a1 + b1 + carry
    if effort == "low":
        return f"{a0}+{b0}={ones}; {a1}+{b1}+{carry}={tens}."
    work = (
        f"{a} is {a1} tens {a0} ones. {b} is {b1} tens {b0} ones. Ones: {a0} + {b0} = {ones}, carry {carry}. "
        f"Tens: {a1} + {b1} + {carry} = {tens}. Result: {tens} tens {ones % 10} ones = {a + b}."
    )
    if effort == "medium":
        return work
    return f"We need to add {a} and {b}. {work} Check: {a + b} - {b} = {a}. This is right."


def subtraction_steps(a: int, b: int, effort: str) -> str:
    if a < b:
        order = f"{a} is smaller than {b}, so swap. " if effort != "low" else "swap. "
        return f"{order}{subtraction_steps(b, a, effort)} So the answer is negative."
    a1, a0, b1, b0 = a // 10, a % 10, b // 10, b % 10
    borrow = int(a0 < b0)
    ones = a0 + 10 * borrow - b0
    tens = a1 - b1 - borrow
    if effort == "low":
        return f"{a0 + 10 * borrow}-{b0}={ones}; {a1}-{b1}-{borrow}={tens}."
    work = (
        f"{a} is {a1} tens {a0} ones. {b} is {b1} tens {b0} ones. "
        f"Ones: {a0 + 10 * borrow} - {b0} = {ones}, borrow {borrow}. "
        f"Tens: {a1} - {b1} - {borrow} = {tens}. Result: {tens} tens {ones} ones = {a - b}."
    )
    if effort == "medium":
        return work
    return f"We need to subtract {b} from {a}. {work} Check: {a - b} + {b} = {a}. This is right."


def make_arithmetic(rng: random.Random, split: Split) -> Sample:
    key, (a, b, op) = draw(rng, split, _draw_pair)
    effort = pick_effort(rng)
    result = a + b if op == "+" else a - b
    steps = addition_steps(a, b, effort) if op == "+" else subtraction_steps(a, b, effort)
    question, answer = _phrase(rng, a, b, op, result)
    return Sample("arithmetic", key, effort, (user(question), analysis(steps), final(answer, (str(result),))))


def _draw_pair(rng: random.Random) -> tuple[tuple[str, ...], tuple[int, int, str]]:
    low = 0 if rng.random() < 0.1 else 10
    a, b, op = rng.randint(low, 99), rng.randint(low, 99), rng.choice("+-")
    if op == "-" and a < b and rng.random() < 0.85:
        a, b = b, a
    return ("arithmetic", op, str(min(a, b)), str(max(a, b))), (a, b, op)


def _phrase(rng: random.Random, a: int, b: int, op: str, result: int) -> tuple[str, str]:
    if rng.random() < 0.2 and result >= 0:
        name, thing = rng.choice(NAMES), rng.choice(COUNTABLE_FOODS)
        event = f"gets {b} more" if op == "+" else f"gives away {b}"
        return f"{name} has {a} {thing} and {event}. How many {thing} does {name} have now?", f"{name} has {result} {thing}."
    word = "plus" if op == "+" else "minus"
    verb = f"Add {a} and {b}." if op == "+" else f"Subtract {b} from {a}."
    question = rng.choice(
        (
            f"What is {a} {op} {b}?",
            f"{a} {op} {b} = ?",
            f"{a} {op} {b}",
            f"What is {a} {word} {b}?",
            f"Please compute {a} {op} {b}.",
            f"Calculate {a} {word} {b}.",
            f"How much is {a} {op} {b}?",
            verb,
        )
    )
    return question, f"{a} {op} {b} = {result}."
