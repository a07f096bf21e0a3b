"""The GPU rank's decode step through the kernels' own source, run on the CPU: sequences come, go and change rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from common.errors import ConfigError, ServingError, WorkerLost
from common.rank_spec import RankSpec
from common.requests import SamplingParams
from decode_worker.block_ring import BlockTables
from decode_worker.run_ahead import RunAhead
from model.batch import SequenceView, build_decode_batch
from model.build import build_model
from model.decode_cuda import CudaDecode, pack_weights
from model.decode_step import StepRows
from model.decode_step_cuda import CudaDecodeStep
from model.gpt_oss import GptOss
from model.kv_cache import KVCache
from model.parallel import LocalGroup
from model.sampling import GREEDY, SamplingState, sample
from model.shards import Mxfp4Matrix
from model.weights import load_shard
from tests.support.emulated_cuda import emulated  # noqa: F401

S, BLOCKS, MAX_BATCH = 16, 64, 4


class Bench:
    """The same weights and KV behind the CUDA step (bf16) and the plain forward (fp32)."""

    def __init__(self, tiny):
        self.config = tiny.config
        load = {"tp": 1, "ep": 1, "rank": 0, "device": "cpu", "weights": "mxfp4"}
        plain = load_shard(tiny.path, tiny.config, dtype=torch.float32, **load)
        packed = load_shard(tiny.path, tiny.config, dtype=torch.bfloat16, **load)
        layers = []
        for index, layer in enumerate(packed.layers):
            part = {
                name: Mxfp4Matrix(*(tiny.tensors[f"model.layers.{index}.mlp.experts.{name}_proj_{kind}"] for kind in ("blocks", "scales")))
                for name in ("gate_up", "down")
            }
            layers.append(replace(layer, experts=replace(layer.experts, **part)))
        generator = torch.Generator().manual_seed(3)
        self.caches = [KVCache(self.config.kv_geometry(S, dtype), 1, 0, BLOCKS, BLOCKS, "cpu") for dtype in ("bfloat16", "float32")]
        for bf16, fp32 in ((self.caches[0].full, self.caches[1].full), (self.caches[0].sliding, self.caches[1].sliding)):
            bf16.copy_(torch.randn(bf16.shape, generator=generator))
            fp32.copy_(bf16)
        self.free = torch.randperm(BLOCKS, generator=generator).tolist()
        self.plain = GptOss(self.config, plain, LocalGroup(), "cpu")
        weights = pack_weights(replace(packed, layers=tuple(layers)))
        decode = CudaDecode(self.config, weights, self.caches[0], max_batch=MAX_BATCH, max_positions=20 * S, device="cpu")
        self.step = CudaDecodeStep(decode, MAX_BATCH)
        self.geometry = self.caches[0].geometry

    def sequence(self, length: int, **params) -> Running:
        ring = self.geometry.sliding_blocks_worst(1)
        blocks = [self.free.pop() for _ in range(max(length // S + 2, ring))]
        state = SamplingState(
            SamplingParams(**{"max_tokens": 9, "temperature": 0, "seed": 1, **params}), [1], [], frozenset({2}), self.config.vocab_size
        )
        return Running(BlockTables(tuple(blocks), tuple(blocks[:ring])), length, 7 + length, state)

    def launch(self, sequences, follows=False):
        """Begins a step; with `follows`, of tokens that the host does not know yet."""
        states = [s.state for s in sequences]
        is_greedy = all(state.on_device() == GREEDY for state in states)
        views = [s.view(self.geometry) for s in sequences]
        self.step.launch(StepRows(views, [id(s) for s in sequences], [follows] * len(states), is_greedy), states)

    def run(self, sequences):
        """One step. Returns: what was picked, and the plain forward's logits"""
        views = [s.view(self.geometry) for s in sequences]
        self.launch(sequences)
        choices = self.step.finish()
        logits = self.plain.forward(build_decode_batch(views, S, "cpu"), self.caches[1])
        for sequence, choice in zip(sequences, choices, strict=True):
            if not isinstance(choice, ServingError):
                sequence.state.record(choice.token_id)
                sequence.token, sequence.position = choice.token_id, sequence.position + 1
        return choices, logits


class Running:
    def __init__(self, tables, position, token, state):
        self.tables, self.position, self.token, self.state = tables, position, token, state

    def view(self, geometry):
        first, sliding = self.tables.sliding_at(geometry, self.position)
        return SequenceView((self.token,), self.position, self.tables.full, first, sliding)


@pytest.fixture
def bench(emulated, tiny):  # noqa: F811
    return Bench(tiny)


def assert_likeliest(choices, logits):
    """Greedy tokens are the likeliest of the plain forward, but for what bf16 blurs."""
    for choice, row in zip(choices, logits, strict=True):
        assert row[choice.token_id] >= row.max() - 0.05 * row.std(), f"{row[choice.token_id]} of {row.max()}"


def test_sequences_come_go_and_change_rows(bench):
    a, b, c, d = (bench.sequence(n) for n in (15, 130, 40, 31))
    for running in ([a], [a, b], [a, b, c], [b, c], [c, d, b], [d]):
        assert_likeliest(*bench.run(running))


@pytest.mark.parametrize("filters", [{"top_k": 50, "top_p": 0.9}, {}], ids=["filters", "temperature alone"])
@pytest.mark.parametrize("other", [{}, {"logprobs": 1}, {"temperature": 1.0, "top_p": 0.5}], ids=["greedy", "logprobs", "filtered"])
def test_sampled_tokens_do_not_depend_on_row_or_batch(bench, filters, other):
    """Nor on what others want: alone a row without filters is screened, beside one that needs logits it is chosen from them."""
    a, beside = bench.sequence(40, temperature=1.0, seed=11, **filters), bench.sequence(33, **other)
    alone = replaceable(a)
    first = bench.run([a])[0][0].token_id
    second = bench.run([beside, alone])[0][1].token_id
    assert first == second


def replaceable(running):
    """The same sequence at the same place: it writes the same KV again."""
    state = SamplingState(running.state.params, [1], [], frozenset({2}), 1024)
    return Running(running.tables, running.position, running.token, state)


def test_rows_with_masks_are_sampled_from_their_own_logits(bench):
    rows = [bench.sequence(40), bench.sequence(33, frequency_penalty=0.5), bench.sequence(20, allowed_token_ids=(5, 9), logprobs=2)]
    states = [replaceable(row).state for row in rows[:1]] + [again(row) for row in rows[1:]]
    choices, _ = bench.run(rows)
    own = sample(bench.step._decode.logits[:3].clone(), states)
    assert [c.token_id for c in choices] == [c.token_id for c in own]
    assert choices[0].logprobs is None
    assert choices[2].logprobs == own[2].logprobs
    assert choices[2].token_id in (5, 9)


def again(running):
    """A state like the sequence's, as it was before its token."""
    return SamplingState(running.state.params, [1], [], frozenset({2}), 1024)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}])
def test_log_probabilities_are_those_of_the_rows_logits(bench, params):
    """Of the token chosen and of as many as were asked for, none included; a neighbour that asks for none gets none."""
    rows = [bench.sequence(40), *(bench.sequence(33, logprobs=count, **params) for count in (0, 3, 20))]
    choices, _ = bench.run(rows)
    logprobs = bench.step._decode.logits[:4].log_softmax(dim=-1)
    assert choices[0].logprobs is None
    for choice, row, count in zip(choices[1:], logprobs[1:], (0, 3, 20), strict=True):
        assert choice.logprobs.logprob == row[choice.token_id]
        assert [t.token_id for t in choice.logprobs.top] == row.topk(count).indices.tolist()
        assert [t.logprob for t in choice.logprobs.top] == row.topk(count).values.tolist()


def test_log_probabilities_of_a_step_ahead_are_its_own(bench):
    """Two steps under way at once: each one's table is of its own logits."""
    row = bench.sequence(40, logprobs=2)
    twin = replaceable(row)
    bench.launch([row])
    row.position += 1
    bench.launch([row], follows=True)
    ahead = [bench.step.finish()[0], bench.step.finish()[0]]
    told = [bench.run([twin])[0][0], bench.run([twin])[0][0]]
    assert [choice.token_id for choice in ahead] == [choice.token_id for choice in told]
    assert [choice.logprobs for choice in ahead] == [choice.logprobs for choice in told]


def test_nan_fails_its_own_sequence(bench):
    rows = [bench.sequence(40), bench.sequence(33)]
    bench.caches[0].full[0, rows[0].tables.full[0]] = float("nan")
    choices, logits = bench.run(rows)
    assert isinstance(choices[0], ServingError)
    assert_likeliest(choices[1:], logits[1:])


def test_ranks_above_the_first_pick_nothing(bench):
    row = bench.sequence(40)
    bench.step.launch(StepRows([row.view(bench.geometry)], [1], [False], True), None)
    assert bench.step.finish() is None


def test_a_step_launched_ahead_goes_on_with_the_tokens_of_the_one_before(bench):
    """Rows move meanwhile: the first sequence leaves, and its row is the last one's next."""
    rows = [bench.sequence(n) for n in (40, 33, 130)]
    twins = [replaceable(row) for row in rows]
    bench.launch(rows)
    for row in rows:
        row.position += 1
        row.token = 999999  # nobody looks at it
    bench.launch(rows[1:], follows=True)
    first, second = bench.step.finish(), bench.step.finish()
    told = bench.run(twins)[0]
    assert [c.token_id for c in first] == [c.token_id for c in told]
    told = bench.run(twins[1:])[0]
    assert [c.token_id for c in second] == [c.token_id for c in told]


class Decoding:
    """A sequence as `RunAhead` sees it, with `wanted` tokens to come."""

    def __init__(self, running: Running, wanted: int):
        self.running, self.wanted, self.tokens = running, wanted, []
        self.state = running.state

    @property
    def tokens_left(self) -> int:
        return self.wanted - len(self.tokens)

    @property
    def position(self) -> int:
        return self.running.position + len(self.tokens)

    def view(self, geometry, row) -> SequenceView:
        token = 0 if row.follows else (self.tokens or [self.running.token])[-1]  # with `follows` the host does not know it yet
        first, sliding = self.running.tables.sliding_at(geometry, row.position)
        return SequenceView((token,), row.position, self.running.tables.full, first, sliding)


def test_whoever_comes_and_goes_every_sequence_gets_the_tokens_it_has_alone(bench):
    """Steps one ahead of the host, as a pool serves: sequences join and leave in every order, and some are dropped under way."""
    lengths, wanted = (40, 15, 130, 33), (3, 1, 4, 2)
    sequences = [bench.sequence(length) for length in lengths]
    untouched = bench.caches[0].buffer.clone()
    expected = []
    for sequence, count in zip(sequences, wanted, strict=True):
        twin = replaceable(sequence)
        expected.append([bench.run([twin])[0][0].token_id for _ in range(count)])
    for seed in (1, 4):
        bench.caches[0].buffer.copy_(untouched)
        rng = np.random.default_rng(seed)
        waiting = [Decoding(replaceable(sequences[i]), wanted[i]) for i in rng.permutation(len(sequences))]
        everybody, running, dropped, ahead = list(waiting), [], [], RunAhead(bench.step.lookahead)
        while waiting or running or ahead.num_under_way:
            while waiting and len(running) < MAX_BATCH and rng.random() < 0.6:
                running.insert(int(rng.integers(len(running) + 1)), waiting.pop())
            if len(running) > 2 and rng.random() < 0.1:
                dropped.append(running.pop(0))
            rows = ahead.next_rows(running)
            if rows:
                views = [row.sequence.view(bench.geometry, row) for row in rows]
                keys, follows = [id(row.sequence) for row in rows], [row.follows for row in rows]
                bench.step.launch(StepRows(views, keys, follows, True), [row.sequence.state for row in rows])
                ahead.launched(rows)
            if ahead.must_finish(bool(rows)):
                choices = bench.step.finish()
                for row, choice in zip(ahead.finished(), choices, strict=True):
                    row.sequence.tokens.append(choice.token_id)
                running = [one for one in running if one.tokens_left]
        by_length = {one.running.position: one.tokens for one in everybody}
        for length, tokens in zip(lengths, expected, strict=True):
            got = by_length[length]
            is_whole = length not in [one.running.position for one in dropped]
            assert got == (tokens if is_whole else tokens[: len(got)]), f"seed {seed}, length {length}"


def test_a_rank_that_did_not_take_part_fails_the_step(bench):
    bench.launch([bench.sequence(40)])
    bench.step._under_way[0].side.results[0] = 2
    with pytest.raises(WorkerLost, match="rank 1"):
        bench.step.finish()


def test_weights_that_the_kernels_do_not_take_are_refused(tiny):
    spec = RankSpec("p", "g", "decode", str(tiny.path), 1, 1, 0, "", 1, b"", device="cuda", weights="bf16")
    with pytest.raises(ConfigError, match="mxfp4 or fp8"):
        build_model(spec, LocalGroup())
