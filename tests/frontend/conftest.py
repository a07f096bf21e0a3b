"""One vocabulary for all tests of the frontend: loading takes 0.3 s and 150 MiB."""

from __future__ import annotations

import pytest

from frontend.harmony.format import HarmonyFormat
from frontend.vocab import Vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


@pytest.fixture(scope="session")
def harmony(vocabulary: Vocabulary) -> HarmonyFormat:
    return HarmonyFormat(vocabulary)
