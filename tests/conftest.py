"""Settings that every test shares: torch uses one thread, here and in processes that tests start, and starts from one seed; examples of
property tests may take as long as a busy machine needs. Where there is no GPU, Triton interprets its kernels: that is settled when triton
is first imported, by whichever test or library does so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("TRITON_INTERPRET", "0" if Path("/dev/nvidiactl").exists() else "1")
hypothesis.settings.register_profile("tandem", deadline=None)
hypothesis.settings.load_profile("tandem")


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "torch" in sys.modules:  # tests without tensors don't pay for its import
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers_in_any_order() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
