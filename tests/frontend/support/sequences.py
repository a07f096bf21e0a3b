"""Random Harmony replies as token ids: well-formed ones, and mutated ones whose payload words can be counted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from frontend.harmony import tokens
from frontend.vocab import Vocabulary

TOOLS = ("get_weather", "search", "f", "run_sql")
SPECIALS = (tokens.RETURN, tokens.CONSTRAIN, tokens.CHANNEL, tokens.START, tokens.END, tokens.MESSAGE, tokens.CALL)
ODD_IDS = (199_998, 199_999, 200_000, 200_013, 201_087, 201_088, 201_089, 2**31, 2**32 - 1, -1)
# Words that no header knows, so that a word in the input can be looked for in the output.
PAYLOAD = (" apple", " Zürich", "(9)", " 東京", " 🍎", "xylo", "\n\n", '"', " Δ", "quux", " wombat", "。", "-42-")


@dataclass
class Sampler:
    """Draws sequences from one seeded source; `ids` caches encodings of short texts."""

    vocabulary: Vocabulary
    random: random.Random
    _cache: dict[str, list[int]] = field(default_factory=dict)

    def ids(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self.vocabulary.text.encode_ordinary(text)
        return self._cache[text]

    def payload(self, most: int = 5) -> list[int]:
        return [i for _ in range(self.random.randint(0, most)) for i in self.ids(self.random.choice(PAYLOAD))]

    def random_text(self, most: int = 12) -> list[int]:
        """Any ordinary ids, broken UTF-8 included."""
        return [self.random.randrange(199_998) for _ in range(self.random.randint(0, most))]

    def call_header(self, channel: str) -> list[int]:
        recipient = self.ids(f" to=functions.{self.random.choice(TOOLS)}")
        kind = self.random.choice(("none", "constrain", "glued", "code"))
        constrain = {
            "none": [],
            "constrain": [*self.ids(" "), tokens.CONSTRAIN, *self.ids("json")],
            "glued": [tokens.CONSTRAIN, *self.ids("json")],
            "code": self.ids(" code"),
        }[kind]
        if self.random.random() < 0.5:
            return [*recipient, tokens.CHANNEL, *self.ids(channel), *constrain]
        return [tokens.CHANNEL, *self.ids(channel), *recipient, *constrain]

    def message(self, body: list[int]) -> list[int]:
        """One message without its end token, as it follows `<|start|>assistant`."""
        kind = self.random.choice(("analysis", "commentary", "final", "call", "call", "analysis call"))
        if kind == "call":
            return [*self.call_header("commentary"), tokens.MESSAGE, *body]
        if kind == "analysis call":
            return [*self.call_header("analysis"), tokens.MESSAGE, *body]
        return [tokens.CHANNEL, *self.ids(kind), tokens.MESSAGE, *body]

    def well_formed(self, *, is_text_random: bool = True) -> list[int]:
        ids: list[int] = []
        count = self.random.randint(1, 4)
        for number in range(count):
            if number:
                ids += [tokens.START, *self.ids("assistant")]
            ids += self.message(self.random_text() if is_text_random else self.payload())
            is_last = number == count - 1
            ids.append(self.random.choice((tokens.RETURN, tokens.CALL, tokens.END)) if is_last else tokens.END)
        return ids if self.random.random() < 0.8 else ids[:-1]

    def mutated(self) -> list[int]:
        ids = self.well_formed(is_text_random=False)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(ids) + 1)
            action = self.random.random()
            if action < 0.3:
                del ids[at : at + self.random.randint(1, 3)]
            elif action < 0.55:
                ids.insert(at, self.random.choice(SPECIALS))
            elif action < 0.65:
                ids[at:at] = self.payload()
            elif action < 0.75:
                ids[at:at] = ids[max(0, at - self.random.randint(1, 4)) : at]
            elif action < 0.85:
                ids[at:at] = self.ids(self.random.choice(("assistant", " to=", "final", "user", "analysis", " json", "{")))
            elif action < 0.92:
                ids.insert(at, self.random.choice(ODD_IDS))
            else:
                del ids[at:]
        return ids

    def soup(self) -> list[int]:
        """No grammar at all: specials and words in any order."""
        ids: list[int] = []
        for _ in range(self.random.randint(0, 25)):
            if self.random.random() < 0.45:
                ids.append(self.random.choice(SPECIALS))
            else:
                ids += self.ids(self.random.choice((*PAYLOAD, "assistant", "final", " to=functions.f", " json", "analysis")))
        return ids
