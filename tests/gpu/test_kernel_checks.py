"""Every kernel against its twin at real shapes and odd ones, with poisoned outputs, and whole steps and layers: the benchmarks' checks."""

import pytest

from benchmarks import decode_checks, decode_checks_fp8, prefill_checks


@pytest.mark.gpu
@pytest.mark.parametrize("name", prefill_checks.CHECKS)
def test_prefill(name: str):
    assert prefill_checks.CHECKS[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("name", decode_checks.CHECKS)
def test_decode(name: str):
    assert decode_checks.CHECKS[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("name", decode_checks_fp8.CHECKS_FP8)
def test_decode_fp8(name: str):
    assert decode_checks_fp8.CHECKS_FP8[name]()
