"""Text transformations on short lists: reverse, sort, count, upper-case, spell.

Lists are written so that every item is one token in the question and in the answer alike. Called by `mixture`.
"""

import random

from tools.tiny_gpt_oss.lexicon import ANIMALS, COLOURS, FOODS, LETTERS, WORDS
from tools.tiny_gpt_oss.sample import Key, Sample, Split, analysis, draw, final, pick_effort, user

# Words whose capital form is one token, too.
UPPER_WORDS = [*COLOURS[:5], "cat", "dog", "sun", "star", "sea", "house", "table", "book", "key", "box", "road", "car"]
SPELLED_WORDS = [word for word in WORDS if 3 <= len(word) <= 5]
Texts = tuple[str, str, str, str]


def make_text(rng: random.Random, split: Split) -> Sample:
    make = rng.choice((_reverse_words, _reverse_letters, _sort_numbers, _sort_words, _count_words, _upper_words, _spell))
    if make is _spell and split == "heldout":
        make = _reverse_letters
    key, (question, thought, answer, value) = draw(rng, split, make) if make is not _spell else make(rng)
    effort = pick_effort(rng)
    if effort == "low":
        thoughts = ()
    elif effort == "medium":
        thoughts = (analysis(thought),)
    else:
        thoughts = (analysis(f"The user wants a text task. {thought} That is the answer."),)
    return Sample("text", key, effort, (user(question), *thoughts, final(answer, (value,))))


def _listing(items: list[str]) -> str:
    return " " + ", ".join(items)


def _reverse_words(rng: random.Random) -> tuple[Key, Texts]:
    items = rng.sample(WORDS, rng.randint(3, 6))
    text, turned = _listing(items), _listing(items[::-1])
    question = rng.choice((f"Reverse this list:{text}", f"Write this list backwards:{text}"))
    return ("reverse", *items), (question, f"The list is{text}. Backwards:{turned}.", f"Reversed:{turned}", turned.strip())


def _reverse_letters(rng: random.Random) -> tuple[Key, Texts]:
    items = [rng.choice(LETTERS) for _ in range(rng.randint(3, 6))]
    text, turned = " " + " ".join(items), " " + " ".join(items[::-1])
    question = f"Reverse these letters:{text}"
    return ("letters", *items), (question, f"The letters are{text}. Backwards:{turned}.", f"Reversed:{turned}", turned.strip())


def _sort_numbers(rng: random.Random) -> tuple[Key, Texts]:
    numbers = rng.sample(range(2, 100), rng.randint(3, 5))
    text, ordered = _listing([str(n) for n in numbers]), _listing([str(n) for n in sorted(numbers)])
    question = rng.choice((f"Sort these numbers:{text}", f"Put these numbers in order:{text}"))
    thought = f"The smallest is {min(numbers)}. The largest is {max(numbers)}."
    return ("sort", *map(str, sorted(numbers))), (question, thought, f"Sorted:{ordered}", ordered.strip())


def _sort_words(rng: random.Random) -> tuple[Key, Texts]:
    items = rng.sample([*ANIMALS, *FOODS, *COLOURS], rng.randint(3, 4))
    text, ordered = _listing(items), _listing(sorted(items))
    question = rng.choice((f"Sort these words:{text}", f"Put these words in order:{text}"))
    thought = "By first letter: " + ", ".join(f"{word[0]} for {word}" for word in sorted(items)) + "."
    return ("sortwords", *sorted(items)), (question, thought, f"Sorted:{ordered}", ordered.strip())


def _count_words(rng: random.Random) -> tuple[Key, Texts]:
    items = rng.sample(WORDS, rng.randint(2, 9))
    text = _listing(items)
    question = rng.choice((f"How many words are in this list?{text}", f"Count the words:{text}"))
    thought = ", ".join(f"{index}: {word}" for index, word in enumerate(items, 1)) + "."
    return ("count", *items), (question, thought, f"There are {len(items)} words.", str(len(items)))


def _upper_words(rng: random.Random) -> tuple[Key, Texts]:
    items = rng.sample(UPPER_WORDS, rng.randint(1, 4))
    text = " " + " ".join(items)
    question = rng.choice((f"Write in upper case:{text}", f"Make this upper case:{text}", f"Capital letters please:{text}"))
    upper = text.upper()
    return ("upper", *items), (question, f"The words are{text}.", f"Upper case:{upper}", upper.strip())


def _spell(rng: random.Random) -> tuple[Key, Texts]:
    word = rng.choice(SPELLED_WORDS)
    forward, backward = " " + " ".join(word), " " + " ".join(word[::-1])
    if rng.random() < 0.5:
        return ("spell", word), (f"Spell the word {word}.", f"The word is {word}.", f"Spelled:{forward}", forward.strip())
    thought = f"The letters are{forward}. Backwards:{backward}."
    return ("spell", word), (f"Spell the word {word} backwards.", thought, f"Reversed:{backward}", backward.strip())
