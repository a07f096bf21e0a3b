"""On a GPU: the shipped tiny model from its checkpoint to tokens, through the step that a decode pool on cuda serves with."""

import pytest

from benchmarks.decode_served import check_served


@pytest.mark.gpu
def test_tiny_model_decodes_as_the_plain_forward_does():
    assert "greedy tokens" in check_served()
