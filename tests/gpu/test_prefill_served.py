"""On a GPU: the shipped tiny model from its checkpoint to first tokens, through the forward that a prefill pool on cuda serves with."""

import pytest

from benchmarks.prefill_served import check_served


@pytest.mark.gpu
def test_tiny_model_prefills_as_the_plain_forward_does():
    assert "first tokens" in check_served()
