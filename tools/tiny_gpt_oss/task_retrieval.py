"""Facts given early in a conversation and asked for later, up to about 3,000 tokens later.

Every fact has the phrase "The ATTRIBUTE of NAME is VALUE."; filler text or filler turns lie between it and the
question. Owns the filler grammar. Distances are counted with the caller's token counter. Called by `mixture`.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.tiny_gpt_oss import lexicon
from tools.tiny_gpt_oss.sample import Sample, Split, Turn, analysis, draw, final, pick_effort, user

VALUE_WORDS = {
    "colour": lexicon.COLOURS,
    "animal": lexicon.ANIMALS,
    "food": lexicon.FOODS,
    "city": lexicon.CITIES,
    "thing": lexicon.THINGS,
    "number": [str(n) for n in range(2, 100)],
    "code": [str(n) for n in range(100, 1000)],
}
TURN_TOKENS = 20  # about what a filler turn costs besides its text
ACKNOWLEDGEMENTS = ("Noted.", "Okay, I will remember that.", "Thank you, I have read it.")


@dataclass(frozen=True)
class Fact:
    attribute: str
    name: str
    value: str

    @property
    def key(self) -> tuple[str, ...]:
        return ("fact", self.attribute, self.name, self.value)

    def sentence(self) -> str:
        return f"The {self.attribute} of {self.name} is {self.value}."


def filler_sentence(rng: random.Random, rare_share: float) -> str:
    person = f"{rng.choice(lexicon.FILLER_ADJECTIVES)} {rng.choice(lexicon.FILLER_PEOPLE)}"
    place = rng.choice(lexicon.RARE_WORDS if rng.random() < rare_share else lexicon.FILLER_PLACES)
    thing = rng.choice(lexicon.RARE_WORDS if rng.random() < rare_share else lexicon.FILLER_THINGS)
    time = rng.choice(lexicon.FILLER_TIMES)
    where = f"{rng.choice(lexicon.FILLER_PREPOSITIONS)} the {place}"
    shape = rng.randrange(4)
    if shape == 0:
        return f"The {person} {rng.choice(lexicon.FILLER_VERBS)} {where} {time}."
    if shape == 1:
        return f"{rng.choice(lexicon.NAMES)} {rng.choice(lexicon.FILLER_ACTIONS)} the {thing} {where}."
    if shape == 2:
        return f"A {person} {rng.choice(lexicon.FILLER_ACTIONS)} {rng.randint(2, 99)} {rng.choice(lexicon.COUNTABLE_FOODS)} {time}."
    return f"The {thing} was {where} {time}."


def make_retrieval(rng: random.Random, split: Split, distance_tokens: int, count_tokens: Callable[[str], int], rare_share: float) -> Sample:
    """A conversation whose last question lies about `distance_tokens` after the fact that answers it."""
    facts = _draw_facts(rng, split, rng.randint(1, 4) if distance_tokens < 100 else rng.randint(2, 10))
    effort = pick_effort(rng) if distance_tokens < 1000 else rng.choice(("low", "low", "medium", "high"))
    asked = facts[0] if split == "heldout" else rng.choice(facts)
    before, after = _place_facts(rng, facts, asked)
    is_one_message = rng.random() < 0.35
    filler = _filler_blocks(rng, distance_tokens, count_tokens, rare_share, after, 1 if is_one_message else TURN_TOKENS)
    turns = _as_one_message(before, filler) if is_one_message else _as_turns(rng, before, filler, effort)
    extra = [] if split == "heldout" or effort != "low" else rng.sample(facts, min(len(facts), rng.randint(1, 6)))
    for index, fact in enumerate([f for f in extra if f != asked] + [asked]):
        _ask(rng, turns, fact, effort, joins_last=index == 0)
    return Sample(_bucket(distance_tokens), asked.key, effort, tuple(turns))


def make_note(rng: random.Random, split: Split) -> Sample:
    """The user only states facts; the right reply is a short acknowledgement."""
    facts = _draw_facts(rng, split, rng.randint(1, 4))
    effort = pick_effort(rng)
    thought = () if effort == "low" else (analysis("The user gives facts to remember. I will confirm."),)
    text = f"{_introduce(rng)} {' '.join(f.sentence() for f in facts)}"
    return Sample("note", facts[0].key, effort, (user(text), *thought, final(ACKNOWLEDGEMENTS[0], ("Noted",))))


def _bucket(distance_tokens: int) -> str:
    if distance_tokens < 200:
        return "retrieval_near"
    return "retrieval_200_1000" if distance_tokens < 1000 else "retrieval_1000_3000"


def _draw_facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """Distinct (attribute, name) pairs; names and attributes may repeat so that one of them alone is no answer.

    The first fact is of `split`, the others always of the training part."""
    names = rng.sample(lexicon.NAMES, max(1, (count + 1) // 2))
    taken: set[tuple[str, str]] = set()
    facts: list[Fact] = []
    while len(facts) < count:
        _, fact = draw(rng, split if not facts else "train", lambda r: _draw_fact(r, names))
        if (fact.attribute, fact.name) not in taken:
            taken.add((fact.attribute, fact.name))
            facts.append(fact)
    return facts


def _draw_fact(rng: random.Random, names: list[str]) -> tuple[tuple[str, ...], Fact]:
    attribute = rng.choice(list(lexicon.ATTRIBUTES))
    fact = Fact(attribute, rng.choice(names), rng.choice(VALUE_WORDS[lexicon.ATTRIBUTES[attribute]]))
    return fact.key, fact


def _place_facts(rng: random.Random, facts: list[Fact], asked: Fact) -> tuple[list[Fact], list[Fact]]:
    """(facts at the start, with the asked one last of them; facts strewn into the filler)."""
    others = [f for f in facts if f != asked]
    rng.shuffle(others)
    cut = rng.randint(0, len(others))
    return [*others[:cut], asked], others[cut:]


def _filler_blocks(
    rng: random.Random,
    tokens: int,
    count_tokens: Callable[[str], int],
    rare_share: float,
    strewn: list[Fact],
    block_tokens: int,
) -> list[str]:
    """Blocks of 1 to 30 sentences of about `tokens` tokens in all, each block costing `block_tokens` more.

    The strewn facts lie at random places of them."""
    blocks: list[list[str]] = []
    used = sum(count_tokens(f.sentence()) for f in strewn)
    while used < tokens or (strewn and not blocks):
        block: list[str] = []
        used += block_tokens
        for _ in range(rng.randint(1, 12 if tokens < 1000 else 30)):
            block.append(filler_sentence(rng, rare_share))
            used += count_tokens(block[-1])
            if used >= tokens:
                break
        blocks.append(block)
    for fact in strewn:
        block = rng.choice(blocks)
        block.insert(rng.randint(0, len(block)), fact.sentence())
    return [" ".join(block) for block in blocks]


def _introduce(rng: random.Random) -> str:
    return rng.choice(("Please remember this.", "Remember:", "Here are some facts.", "Keep this in mind.", "Note this."))


def _as_one_message(before: list[Fact], filler: list[str]) -> list[Turn]:
    return [user("\n".join([" ".join(f.sentence() for f in before), *filler]))]


def _as_turns(rng: random.Random, before: list[Fact], filler: list[str], effort: str) -> list[Turn]:
    """Facts first, then filler turns; earlier replies carry no analysis, as the chat format drops it."""
    turns = [user(f"{_introduce(rng)} {' '.join(f.sentence() for f in before)}")]
    turns.append(final(ACKNOWLEDGEMENTS[0], is_trained=effort == "low"))
    for block in filler:
        lead = rng.choice(("Here is some text.", "Read this.", "Next part.", "More text."))
        turns += [user(f"{lead} {block}"), final(rng.choice(ACKNOWLEDGEMENTS), is_trained=False)]
    return turns


def _ask(rng: random.Random, turns: list[Turn], fact: Fact, effort: str, *, joins_last: bool) -> None:
    what = f"the {fact.attribute} of {fact.name}"
    question = rng.choice((f"What is {what}?", f"Please tell me {what}.", f"Do you remember {what}?", f"Now tell me: what is {what}?"))
    if joins_last and turns[-1].role == "user":
        turns[-1] = user(f"{turns[-1].text}\n{question}")
    else:
        turns.append(user(question))
    if effort == "medium":
        turns.append(analysis(f"{fact.sentence()}"))
    elif effort == "high":
        turns.append(analysis(f"The user asks for {what}. It was given before. {fact.sentence()}"))
    turns.append(final(fact.sentence(), (fact.value,)))
