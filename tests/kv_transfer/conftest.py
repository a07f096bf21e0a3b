"""Fixtures of all transfer tests."""

import pytest

from kv_transfer.transports import choose, nccl
from tests.support.pace import within


@pytest.fixture(autouse=True)
def _patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of an emulated device waits for its thread, which a loaded machine may not run for seconds, and copies by hand."""
    monkeypatch.setattr(nccl, "_PROBE_BYTES", 64 << 10)
    monkeypatch.setattr(choose, "_PROBE_TIMEOUT_S", within(10.0))
