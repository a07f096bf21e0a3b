"""Fixtures of all transfer tests."""

import pytest

from kv_transfer.transports import choose
from tests.support.pace import within


@pytest.fixture(autouse=True)
def _patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of an emulated device waits for its thread, which a loaded machine may not run for seconds."""
    monkeypatch.setattr(choose, "_PROBE_TIMEOUT_S", within(10.0))
