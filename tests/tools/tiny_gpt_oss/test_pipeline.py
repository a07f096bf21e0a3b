"""Training packs and learns; the smoke size runs from data to a checkpoint that transformers agrees with."""

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tools.tiny_gpt_oss.model_card import README, RESULTS, fill
from tools.tiny_gpt_oss.packing import packed_rows
from tools.tiny_gpt_oss.shards import IGNORED, TARGET, TokenDocs
from tools.tiny_gpt_oss.smoke import PACKED_FILE, run_smoke


def docs() -> TokenDocs:
    lengths = np.asarray([5, 9, 3, 30, 7], dtype=np.int32)
    total = int(lengths.sum())
    rows = np.arange(1, total + 1, dtype=np.uint16)
    return TokenDocs(rows, np.full(total, TARGET, dtype=np.uint8), lengths, np.arange(5, dtype=np.uint8))


def test_packed_rows_keep_conversations_whole_and_targets_inside() -> None:
    seen = []
    for row in packed_rows(docs(), 16, seed=1, is_endless=False):
        assert len(row.rows) == len(row.targets) == len(row.kinds) == len(row.positions) == 16
        for document, task in enumerate(row.tasks):
            inside = np.flatnonzero(row.documents == document)
            assert row.positions[inside].tolist() == list(range(len(inside)))
            assert row.kinds[inside[-1]] == IGNORED
            if task >= 0:
                assert row.targets[inside[:-1]].tolist() == row.rows[inside[1:]].tolist()
                seen.append(int(task))
    assert sorted(seen) == [0, 1, 2, 4]  # the one of 30 tokens is longer than a row


def test_endless_rows_go_on() -> None:
    assert len(list(islice(packed_rows(docs(), 16, seed=1, is_endless=True), 20))) == 20


def test_model_card_gets_the_figures() -> None:
    results = {
        "facts": {"date": "2030-01-02", "steps": 1234},
        "goals": {"arithmetic": 0.97},
        "tables": {"mxfp4": {"arithmetic": {"right": 1, "total": 2, "share": 0.5}}},
    }
    served = {"facts": {}, "goals": {}, "tables": {"served": {"text": {"right": 3, "total": 4, "share": 0.75}}, "other": {}}}
    card = fill("a <!-- figures: begin -->old<!-- figures: end --> z", results, served)
    assert "| text |  | 75.00% of 4 |  |" in card
    assert "50.00% of 2" in card
    assert "1,234" in card
    assert "old" not in card
    assert card.endswith(" z")


def test_the_card_shows_what_the_results_say() -> None:
    card = README.read_text()
    assert fill(card, *(json.loads(path.read_text()) for path in RESULTS)) == card


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_smoke_pipeline_matches_transformers(tmp_path: Path) -> None:
    results, comparison = run_smoke(tmp_path, tmp_path / "vocabulary", train_minutes=0.1)
    assert comparison.max_logit_error < 1e-3
    assert comparison.is_greedy_equal
    assert comparison.unused_ids_logit_spread == 0
    assert results["tables"]["mxfp4"]["well_formed"]["total"] == 4
    assert (tmp_path / PACKED_FILE).stat().st_size < 12_000_000
