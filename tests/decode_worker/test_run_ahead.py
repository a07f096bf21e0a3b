"""Steps that run ahead of what the host knows: what may be launched, what an end costs, and that no token is sent too many."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from common.errors import CapacityError
from common.proto import types_pb2, worker_pb2
from common.requests import SamplingParams, sampling_to_proto
from decode_worker.run_ahead import RunAhead, is_greedy
from decode_worker.scheduler import Place
from decode_worker.sequence import Sequence
from model.parallel import LocalGroup
from model.sampling import TokenChoice
from tests.decode_worker.test_engine import Bench
from tests.support.fake_model import CONFIG, AheadStep, expected_tokens

GREEDY = SamplingParams(max_tokens=4, temperature=0, seed=1, ignore_eos=True)


def sequence(params=GREEDY, transfer_id=1):
    work = worker_pb2.Work(internal_id=f"r{transfer_id}", prompt_ids=range(3, 13), sampling=sampling_to_proto(params))
    one = Sequence(work, "a", transfer_id=transfer_id, vocab_size=900, max_len=99, eos_token_ids=frozenset(), token_bytes=None, now_s=0.0)
    one.begin(5, None)
    return one


def test_a_step_is_launched_before_the_one_before_is_known():
    ahead, one = RunAhead(1), sequence()
    first = ahead.next_rows([one])
    assert [(row.position, row.follows) for row in first] == [(10, False)]
    ahead.launched(first)
    assert not ahead.must_finish(has_launched=True)
    second = ahead.next_rows([one])
    assert [(row.position, row.follows) for row in second] == [(11, True)]
    ahead.launched(second)
    assert ahead.must_finish(has_launched=True)
    assert ahead.next_rows([one]) == []  # two are under way
    assert ahead.finished() == first
    assert ahead.count(one) == 1


def test_without_lookahead_each_step_is_finished_before_the_next():
    ahead, one = RunAhead(0), sequence()
    ahead.launched(ahead.next_rows([one]))
    assert ahead.must_finish(has_launched=True)
    assert ahead.next_rows([one]) == []


def test_no_step_runs_past_max_tokens():
    ahead, one = RunAhead(1), sequence(replace(GREEDY, max_tokens=3))
    for _ in range(2):
        ahead.launched(ahead.next_rows([one]))
    ahead.finished()
    one.advance(TokenChoice(7))
    assert one.tokens_left == 1
    assert ahead.next_rows([one]) == []  # its last token is under way
    assert ahead.must_finish(has_launched=False)


@pytest.mark.parametrize(
    "options", [{"allowed_token_ids": (4,)}, {"frequency_penalty": 0.5}, {"min_tokens": 3, "ignore_eos": False, "stop_token_ids": (8,)}]
)
def test_a_token_that_the_host_picks_is_waited_for(options):
    ahead, plain, one = RunAhead(1), sequence(), sequence(replace(GREEDY, **options), transfer_id=2)
    rows = ahead.next_rows([plain, one])
    assert len(rows) == 2
    assert not is_greedy(rows)
    ahead.launched(rows)
    assert ahead.next_rows([plain, one]) == []
    assert ahead.must_finish(has_launched=False)


def test_log_probabilities_hold_no_step_up_but_take_logits():
    ahead, plain, one = RunAhead(1), sequence(), sequence(replace(GREEDY, logprobs=2), transfer_id=2)
    rows = ahead.next_rows([plain, one])
    assert not is_greedy(rows)
    ahead.launched(rows)
    assert len(ahead.next_rows([plain, one])) == 2


class HandDriven:
    """A device that tells what was asked of it, and picks a stop token where told. `ends`: by position of the row."""

    lookahead = 1

    def __init__(self, stops_at):
        self.events, self.steps, self._stops_at = [], [], stops_at
        self.during_finish = lambda rows: None

    def launch(self, rows, states):
        self.events.append("launch")
        self.steps.append(rows)

    def finish(self):
        self.events.append("finish")
        rows = self.steps.pop(0)
        self.during_finish(rows)
        return [TokenChoice(CONFIG.eos_token_ids[0] if view.start >= self._stops_at else 7) for view in rows.views]


def test_an_end_takes_effect_one_step_late_and_no_token_is_sent_too_many():
    device = HandDriven(stops_at=25)
    with Bench(make_step=lambda *_: device) as bench:
        places = []
        device.during_finish = lambda rows: places.append((rows.views[0].start, bench.scheduler.place(rows.keys[0])))
        command = bench.reserve("r", prompt=20, sampling=SamplingParams(max_tokens=50, temperature=0, seed=1))
        bench.start()
        bench.commit(command.done.result(3)).done.result(3)
        bench.wait_idle()
    tokens = [token for output in bench.outputs for token in output.token_ids]
    assert tokens == [7] * 5 + [CONFIG.eos_token_ids[0]]  # of positions 20 to 25, and nothing after
    assert bench.outputs[-1].finish.reason == types_pb2.FINISH_REASON_STOP
    # Position 26 was under way when 25 ended the request; its blocks were still its own then.
    assert places == [(position, Place.RUNNING) for position in range(20, 27)]
    assert device.events[:5] == ["launch", "launch", "finish", "launch", "finish"]
    assert device.events.count("launch") == device.events.count("finish") == 7


def test_tokens_are_right_while_blocks_change_hands_under_steps_ahead():
    """Requests through a pool that holds few at a time: whoever wrote into blocks that are another's by then would spoil its KV, and the
    fake model's tokens are a hash of it."""
    rng = random.Random(4)
    with Bench(make_step=lambda model, kv, _: AheadStep(model, kv, LocalGroup())) as bench:
        bench.start()
        waiting, truth = list(range(24)), {}
        while waiting:
            prompt, count = rng.randint(1, 150), rng.randint(2, 24)
            ids = [*range(3, 3 + prompt), 5]  # the prompt, and the token that the writer sampled
            expected = [5, *expected_tokens(ids, count - 1)]
            stop = expected[rng.randrange(1, count)] if waiting[0] % 2 else None
            params = replace(GREEDY, max_tokens=count, stop_token_ids=(stop,) if stop else ())
            try:
                reservation = bench.reserve(f"r{waiting[0]}", prompt=prompt, sampling=params).done.result(3)
            except CapacityError:
                time.sleep(0.002)
                continue
            bench.write(reservation, ids[:-1])
            bench.commit(reservation)
            truth[f"r{waiting.pop(0)}"] = expected[1 : expected.index(stop, 1) + 1] if stop else expected[1:]
        bench.wait_idle(10.0)
    got = {name: [] for name in truth}
    for output in bench.outputs:
        assert not output.error_status, output
        got[output.internal_id] += output.token_ids
    assert got == truth
