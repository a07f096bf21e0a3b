"""Which message is faulted and how: seeded, counted in a file that all processes of a run append to. Nothing of it is in product code."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ENVIRONMENT = "TANDEM_TEST_FAULTS"
KINDS = ("drop", "delay", "reorder", "duplicate", "truncate", "flip")


@dataclass(frozen=True)
class FaultSettings:
    """Handed to rank processes in the environment. `one_in`: messages of which one is faulted, 0 for none; `delay_s`: the longest."""

    folder: str
    seed: int = 1
    one_in: int = 0
    delay_s: float = 0.5
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0

    def to_environment(self) -> dict[str, str]:
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> FaultSettings:
        return cls(**json.loads(os.environ[ENVIRONMENT]))


class FaultPlan:
    """Draws for one process, from any thread."""

    def __init__(self, settings: FaultSettings, name: str):
        self.settings = settings
        self._rng = random.Random(f"{settings.seed} {name}")
        self._lock = threading.Lock()
        self._counts = os.open(Path(settings.folder) / "faults", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def draw(self, where: str) -> str | None:
        """The kind of fault that this message gets, None for most. `where`: data or the method's name, for the count."""
        with self._lock:
            if self.settings.one_in == 0 or self._rng.randrange(self.settings.one_in):
                return None
            kind = self._rng.choice(KINDS)
        os.write(self._counts, f"{where} {kind}\n".encode())
        return kind

    def below(self, limit: int) -> int:
        with self._lock:
            return self._rng.randrange(limit)

    def delay_s(self) -> float:
        with self._lock:
            return self._rng.uniform(0, self.settings.delay_s)


def counts_of(folder: Path) -> Counter[str]:
    """Faults by "where kind"."""
    path = folder / "faults"
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()
