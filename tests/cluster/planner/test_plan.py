"""The planner: cheapest that meets the SLO, "do not disaggregate this", nothing fits; and groups that prefill and decode at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from cluster.cli.app import app
from cluster.cli.economics import plan, simulate  # noqa: F401 - registers the commands
from cluster.cost_model import PairLoad, Shape, itl_ms, prefill_ms, prepare_decode, prepare_prefill
from cluster.load.arrivals import Lengths, Load, random_load
from cluster.planner.candidates import Candidate, Slo, candidates
from cluster.planner.plan import make_plan, try_candidate
from cluster.profile import builtin_profile
from cluster.sim.aggregated import run_aggregated
from cluster.sim.deployment import spec_for
from common.errors import ConfigError

PROFILE = builtin_profile(36, on_cuda=True)


def load(rate: float, prompt: int = 8000, output: int = 300, count: int = 250) -> Load:
    return random_load(count, rate, Lengths(prompt, 0.3), Lengths(output, 0.3), seed=0)


def test_the_best_meets_the_slo_and_nothing_cheaper_that_was_tried_does():
    slo = Slo(500, 8)
    answer = make_plan(PROFILE, load(10.0), slo, 16, 3.0)
    assert answer.best is not None
    assert answer.best.summary.attainment >= slo.attainment
    assert answer.best.candidate.gpus <= 16
    assert answer.next_best is None or answer.next_best.candidate.usd_per_hour >= answer.best.candidate.usd_per_hour
    assert answer.cheaper is None or not answer.cheaper.meets
    again = try_candidate(PROFILE, load(10.0), slo, answer.best.candidate)
    assert again.summary == answer.best.summary


def test_a_small_load_is_not_disaggregated():
    answer = make_plan(PROFILE, load(1.0, prompt=400, output=80), Slo(1000, 50), 8, 3.0)
    assert answer.best is not None
    assert answer.best.candidate.kind == "aggregated"
    assert answer.best.candidate.gpus == 1
    assert answer.verdict.startswith("do not disaggregate this")


def test_more_than_the_gpus_can_do_is_said():
    answer = make_plan(PROFILE, load(200.0), Slo(300, 5), 2, 3.0)
    assert answer.best is None
    assert "nothing" in answer.verdict


def test_candidates_are_within_the_gpus_and_cheapest_first():
    found = candidates(PROFILE, load(10.0), Slo(500, 10), 12, 2.0)
    assert found
    prices = [candidate.usd_per_hour for candidate in found]
    assert prices == sorted(prices)
    assert all(candidate.gpus <= 12 and candidate.usd_per_hour == pytest.approx(2.0 * candidate.gpus) for candidate in found)
    assert {candidate.kind for candidate in found} == {"disaggregated", "aggregated"}
    assert not [c for c in candidates(PROFILE, load(1.0), Slo(0.5, 10), 64, 2.0) if isinstance(c, Candidate)]


def test_an_aggregated_group_takes_what_the_profile_says_for_one_request():
    spec = spec_for(PROFILE, "both", 1, 1, "mxfp4", 3.0)
    record = run_aggregated(PROFILE, spec, 1, Load(np.array([0.0]), np.array([6000]), np.array([51])))
    assert record.ttft_ms[0] == pytest.approx(prefill_ms(prepare_prefill(PROFILE, spec), 6000))
    assert record.itl_ms[0] == pytest.approx(itl_ms(prepare_decode(PROFILE, spec), PairLoad(), Shape(6000, 51, 6051)), rel=1e-3)


def test_a_prefill_on_the_same_gpus_slows_the_tokens_of_others():
    spec = spec_for(PROFILE, "both", 1, 1, "mxfp4", 3.0)
    quiet = Load(np.array([0.0]), np.array([1000]), np.array([200]))
    beside = Load(np.array([0.0, 0.2]), np.array([1000, 30_000]), np.array([200, 2]))
    alone, disturbed = (run_aggregated(PROFILE, spec, 1, x).itl_ms[0] for x in (quiet, beside))
    assert disturbed > alone * 1.5


def test_the_commands_show_tables_and_write_json(tmp_path):
    run = CliRunner()
    path = tmp_path / "plan.json"
    shape = ["--rate", "2", "--input-tokens", "1000", "--output-tokens", "60", "--requests", "120"]
    planned = run.invoke(app, ["plan", *shape, "--ttft-ms", "800", "--itl-ms", "40", "--gpus", "4", "--json", str(path)])
    assert planned.exit_code == 0, planned.output
    assert json.loads(path.read_text())["best"]["gpus"] <= 4
    path = tmp_path / "sim.json"
    pools = ["--pool", "prefill:tp1:fp8:1", "--pool", "decode:tp1:mxfp4:1"]
    simulated = run.invoke(app, ["simulate", *pools, *shape, "--policy", "all", "--json", str(path)])
    assert simulated.exit_code == 0, simulated.output
    assert {name: figures["finished"] for name, figures in json.loads(path.read_text()).items()} == dict.fromkeys(
        ("cost-aware", "round-robin", "least-loaded", "shortest-queue"), 120
    )


@pytest.mark.parametrize(
    "options", [["--rate", "1"], ["--pool", "prefill:tp1:fp8:1"], ["--pool", "x", "--rate", "1"], ["--autoscale", "--pool", "x"]]
)
def test_incomplete_simulations_are_refused(options):
    result = CliRunner().invoke(app, ["simulate", *options])
    assert isinstance(result.exception, ConfigError)
