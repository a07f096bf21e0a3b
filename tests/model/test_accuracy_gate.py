"""The accuracy that each weight format and forward pass keeps on the trained model may not fall below the stored record.

After a change that moves it on purpose: `TANDEM_RECORD_ACCURACY=1 pytest tests/model/test_accuracy_gate.py`, and say why in the commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from model.convert import convert_checkpoint
from tests.support.trained import make_trained
from tools.tiny_gpt_oss.accuracy import measure

RECORD = Path(__file__).with_name("accuracy_gate.json")
TASKS = ("arithmetic", "tool", "text", "chat", "refusal", "retrieval_near")
WAYS = ("bf16", "fp8_weights", "prefill_fp8", "prefill_bf16_qkv", "prefill_bf16")
SLACK = 1.1  # sums in another order on another machine
FLOOR = 1e-9  # a KL below this says nothing


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, dict[str, float]]:
    trained = make_trained(tmp_path_factory.mktemp("model"))
    convert_checkpoint(trained.path)
    found = measure(trained.path, [trained.examples[task] for task in TASKS], answer_tokens=3)
    if os.environ.get("TANDEM_RECORD_ACCURACY"):
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_no_format_is_further_from_fp32_than_recorded(measured, way):
    record, now = json.loads(RECORD.read_text())[way], measured[way]
    assert now["positions"] == record["positions"] == 3 * len(TASKS)
    assert now["top1_agreement"] >= record["top1_agreement"]
    assert now["mean_logits_error"] <= record["mean_logits_error"] * SLACK
    assert now["mean_kl"] <= record["mean_kl"] * SLACK + FLOOR
    assert now["max_kl"] <= record["max_kl"] * 2 + FLOOR
