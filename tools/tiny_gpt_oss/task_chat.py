"""Greetings in six languages, small talk, capitals, polite refusals and honest "I do not know".

The fixed phrases are a closed set and have no held-out part; those with a name or an object in them have one.
Called by `mixture`.
"""

# ruff: noqa: SIM905  (a list of phrases reads better as one string)
import random

from tools.tiny_gpt_oss.lexicon import CAPITALS, CITIES, LANGUAGES, NAMES, THINGS
from tools.tiny_gpt_oss.sample import Key, Sample, Split, analysis, draw, final, pick_effort, user

SMALL_TALK = (
    (("Hello!", "Hello", "Hi", "Hi there!", "Hey!"), "Hello! How can I help you today?"),
    (("How are you?", "How are you today?"), "I am fine, thank you. How can I help you?"),
    (("Thank you!", "Thanks!", "Thanks a lot."), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later."), "Goodbye! Have a nice day."),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good night!", "Good night"), "Good night!"),
    (("Who are you?", "What are you?", "What is your name?"), "I am a tiny gpt-oss, a small test model."),
    (
        ("What can you do?", "How can you help me?", "Help"),
        "I can add and subtract, remember facts, call tools, and reverse, sort and count words.",
    ),
    (("👋", "Hello 👋", "Hi 👋"), "Hello 👋 How can I help you?"),
)
BAD_ACTS = "break into|steal from|burn down|blow up|rob|destroy|hack|poison|spy on|damage".split("|")
BAD_TARGETS = (
    "the bank|the school|my neighbour|the church|the hospital|the museum|a house|a car|a shop|the police station|"
    "the airport|a phone|a computer|my boss|the library|the power plant|a hotel|the train"
).split("|")
REFUSAL = "I am sorry, but I cannot help with that."
UNKNOWN_SHAPES = (
    "Why is the {a} {b}?|Who invented the {a}?|Tell me the history of the {a}.|Write a poem about the {a} and the {b}.|"
    "Explain how a {a} works.|Is a {a} better than a {b}?|When was the first {a} made?|What do you think about the {a}?"
).split("|")
UNKNOWN_ANSWER = "I am only a small test model and I do not know that."


def make_chat(rng: random.Random, split: Split) -> Sample:
    if split == "heldout":
        return _greeting_with_name(rng, split)
    make = rng.choice((_small_talk, _small_talk, _foreign, _foreign, _greeting_with_name, _capital))
    return make(rng, split)


def make_refusal(rng: random.Random, split: Split) -> Sample:
    key, (act, target) = draw(rng, split, _draw_bad)
    question = rng.choice(
        (f"How can I {act} {target}?", f"Help me {act} {target}.", f"Tell me how to {act} {target}.", f"I want to {act} {target}.")
    )
    return _sample(rng, "refusal", key, question, "This could harm someone. I will refuse politely.", REFUSAL, ("cannot help",))


def make_unknown(rng: random.Random, split: Split) -> Sample:
    """A question outside of what the model was taught: the answer says so."""
    key, question = draw(rng, split, _draw_unknown)
    return _sample(rng, "unknown", key, question, "I was not taught this. I will say so.", UNKNOWN_ANSWER, ("do not know",))


def _draw_bad(rng: random.Random) -> tuple[Key, tuple[str, str]]:
    act, target = rng.choice(BAD_ACTS), rng.choice(BAD_TARGETS)
    return ("refusal", act, target), (act, target)


def _draw_unknown(rng: random.Random) -> tuple[Key, str]:
    a, b = rng.sample(THINGS, 2)
    question = rng.choice(UNKNOWN_SHAPES).format(a=a, b=b)
    return ("unknown", question), question


def _small_talk(rng: random.Random, split: Split) -> Sample:
    questions, answer = rng.choice(SMALL_TALK)
    return _sample(rng, "chat", ("chat", answer), rng.choice(questions), "The user makes small talk.", answer, (answer,))


def _foreign(rng: random.Random, split: Split) -> Sample:
    language = rng.choice(list(LANGUAGES))
    question, answer = LANGUAGES[language][rng.choice(list(LANGUAGES[language]))]
    name = rng.choice(NAMES)
    key, (question, answer) = ("chat", language, question), (question.format(name=name), answer.format(name=name))
    return _sample(rng, "chat", key, question, f"The user writes in {language}.", answer, (answer,))


def _greeting_with_name(rng: random.Random, split: Split) -> Sample:
    key, (name, city) = draw(rng, split, _draw_person)
    question, answer = rng.choice(
        (
            (f"Hello, I am {name} from {city}.", f"Hello {name}! How is {city} today?"),
            (f"Hi, my name is {name} and I live in {city}.", f"Nice to meet you, {name} from {city}!"),
        )
    )
    return _sample(rng, "chat", key, question, f"The user is {name} from {city}.", answer, (name, city))


def _draw_person(rng: random.Random) -> tuple[Key, tuple[str, str]]:
    name, city = rng.choice(NAMES), rng.choice(CITIES)
    return ("person", name, city), (name, city)


def _capital(rng: random.Random, split: Split) -> Sample:
    country, city = rng.choice(list(CAPITALS.items()))
    question = rng.choice((f"What is the capital of {country}?", f"Name the capital of {country}."))
    answer = f"The capital of {country} is {city}."
    return _sample(rng, "chat", ("capital", country), question, f"A question about {country}.", answer, (city,))


def _sample(rng: random.Random, task: str, key: Key, question: str, thought: str, answer: str, values: tuple[str, ...]) -> Sample:
    effort = pick_effort(rng)
    if effort == "low":
        thoughts = ()
    elif effort == "medium":
        thoughts = (analysis(thought),)
    else:
        thoughts = (analysis(f"The user wrote: {question} {thought} A short answer is best."),)
    return Sample(task, key, effort, (user(question), *thoughts, final(answer, values)))
