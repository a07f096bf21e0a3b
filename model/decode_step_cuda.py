"""The decode step of a GPU rank: running sequences into the rows of the captured step, its tokens out, in one upload and one download.

Owns which sequence lies in which row, what the device knows of it and which steps are under way. Tokens are sampled on the GPU and go from
one step into the next there, log-probabilities are computed there; a row that has masks, bias or penalties is sampled from its logits on
the CPU, by the same reference as everywhere. Nothing here waits for the device but `finish`. Called by the decode executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import ServingError, WorkerLost
from common.requests import MAX_LOGPROBS
from kernels.peers import missing_rank
from kernels.sampling_cuda import BAD_LOGITS, SamplingRows
from model.batch import SequenceView
from model.decode_cuda import BUCKETS, STATUS_WORDS, CudaDecode
from model.decode_step import StepRows
from model.row_places import Place, RowPlaces
from model.sampling import GREEDY, DeviceSampling, SamplingState, TokenChoice, logprob_tables, sample, told_logprobs


class _HostSide:
    """Pinned memory of one step under way. Two take turns: one is written again only when the step that it fed is finished."""

    def __init__(self, decode: CudaDecode):
        inputs = decode.inputs

        def pinned(like: Tensor) -> Tensor:
            return torch.zeros_like(like, device="cpu", pin_memory=like.is_cuda)

        self.packed, self.full_table, self.results = pinned(inputs.packed), pinned(inputs.full_table), pinned(decode.results)
        max_batch, device = len(inputs.seq_lens), inputs.packed.device
        self.told_rows = pinned(torch.empty(max_batch, dtype=torch.int64, device=device))
        self.logprobs = pinned(torch.empty(max_batch, 1 + MAX_LOGPROBS, device=device))
        self.likeliest = pinned(torch.empty(max_batch, MAX_LOGPROBS, dtype=torch.int64, device=device))
        small = inputs.split(self.packed)
        self.token_source, self.seq_lens, self.sliding_start, self.sliding_table = (view.numpy() for view in small[:4])
        self.sampling = {name: getattr(small.sampling, name).numpy() for name in SamplingRows.__dataclass_fields__}
        self.done = torch.cuda.Event() if inputs.packed.is_cuda else None


@dataclass(frozen=True)
class _UnderWay:
    side: _HostSide
    places: list[Place]
    wanted: list[DeviceSampling | None]
    states: Sequence[SamplingState] | None
    told: list[int]  # the indices of the rows with log-probabilities, in the order in which `side` has them


class CudaDecodeStep:
    """Units: max_batch: most sequences at once"""

    lookahead = 1

    def __init__(self, decode: CudaDecode, max_batch: int):
        self._decode = decode
        self._buckets = [b for b in BUCKETS if b < max_batch] + [max_batch]
        self._sides = deque(_HostSide(decode) for _ in range(self.lookahead + 1))
        self._told_rows = torch.empty(len(decode.inputs.seq_lens), dtype=torch.int64, device=decode.inputs.packed.device)
        self._places = RowPlaces()
        self._tables: list[tuple[int, int]] = [(0, 0)] * max_batch  # whose full table, and how much of it, the device has in a row
        self._under_way: deque[_UnderWay] = deque()

    def capture(self) -> None:
        """Records the graphs of all buckets. Effects: all rows are padded ones meanwhile; takes seconds"""
        for bucket in reversed(self._buckets):  # the largest first: the others fit into its memory
            for needs_logits in (False, True):
                self._decode.capture(bucket, needs_logits=needs_logits)

    def launch(self, rows: StepRows, states: Sequence[SamplingState] | None) -> None:
        """As `model/decode_step.py` says. Effects: enqueues an upload, the step and a download; returns at once"""
        decode, side = self._decode, self._sides[0]
        self._sides.rotate(-1)
        places = self._places.place(rows.keys)
        wanted: list[DeviceSampling | None] = [GREEDY] * len(places) if states is None else [state.on_device() for state in states]
        self._write_rows(side, rows, places)
        self._write_tables(side, rows, places)
        for name, values in side.sampling.items():
            values[[place.row for place in places]] = [getattr(w or GREEDY, name) for w in wanted]
        decode.inputs.packed.copy_(side.packed, non_blocking=True)
        needs_logits = not (rows.is_greedy or (decode.is_alone and all(w is not None and not w.needs_logits for w in wanted)))
        decode.run(next(b for b in self._buckets if b >= len(places)), needs_logits=needs_logits)
        side.results.copy_(decode.results, non_blocking=True)
        told = [index for index, w in enumerate(wanted) if w is not None and w.logprobs is not None]
        if told:
            self._download_logprobs(side, [places[index].row for index in told])
        if side.done is not None:
            side.done.record()
        self._under_way.append(_UnderWay(side, places, wanted, states, told))

    def finish(self) -> list[TokenChoice | ServingError] | None:
        """As `model/decode_step.py` says."""
        step = self._under_way.popleft()
        if step.side.done is not None:
            step.side.done.synchronize()
        results = step.side.results.tolist()
        lost = missing_rank(results[0])
        if lost is not None:
            raise WorkerLost("a rank of the group did not take part in a step in time", rank=lost)
        if step.states is None:
            return None
        tokens = [results[STATUS_WORDS + place.row] for place in step.places]
        choices: list[TokenChoice | ServingError] = [
            TokenChoice(token)
            if token != BAD_LOGITS
            else ServingError(f"the model's logits for output token {state.num_output} are not finite")
            for token, state in zip(tokens, step.states, strict=True)
        ]
        for at, index in enumerate(step.told):
            choices[index] = _with_logprobs(choices[index], step.wanted[index], step.side, at)
        on_host = [index for index, wanted in enumerate(step.wanted) if wanted is None]
        if on_host:
            assert not self._under_way  # whoever launches knows that such rows can't be followed before they are finished
            logits = self._decode.logits[[step.places[index].row for index in on_host]].cpu()
            for index, choice in zip(on_host, sample(logits, [step.states[index] for index in on_host]), strict=True):
                choices[index] = choice
        return choices

    def _download_logprobs(self, side: _HostSide, rows: list[int]) -> None:
        """Effects: enqueues log-probabilities of these rows of the step that was enqueued last, and their download"""
        decode, count = self._decode, len(rows)
        side.told_rows[:count] = torch.tensor(rows)
        at = self._told_rows[:count]
        at.copy_(side.told_rows[:count], non_blocking=True)
        chosen, values, ids = logprob_tables(decode.logits[at], decode.token_ids[at].clamp(min=0), MAX_LOGPROBS)
        side.logprobs[:count].copy_(torch.cat((chosen[:, None], values), dim=1), non_blocking=True)
        side.likeliest[:count].copy_(ids, non_blocking=True)

    def _write_rows(self, side: _HostSide, rows: StepRows, places: list[Place]) -> None:
        width = side.sliding_table.shape[1]
        at = [place.row for place in places]
        side.token_source[at] = [_source(*row) for row in zip(rows.views, rows.follows, places, strict=True)]
        side.seq_lens[at] = [view.start + 1 for view in rows.views]
        side.seq_lens[len(at) :] = 0
        side.sliding_start[at] = [view.sliding_first * self._decode.block_size for view in rows.views]
        side.sliding_table[at] = [[*view.sliding_blocks, *[0] * (width - len(view.sliding_blocks))] for view in rows.views]

    def _write_tables(self, side: _HostSide, rows: StepRows, places: list[Place]) -> None:
        """A sequence's table travels when it comes, grows or changes rows; its caller knows all its blocks from the start."""
        for place, key, view in zip(places, rows.keys, rows.views, strict=True):
            known = (key, len(view.full_blocks))
            if self._tables[place.row] != known:
                table = side.full_table[place.row, : len(view.full_blocks)]
                table.copy_(torch.tensor(view.full_blocks, dtype=torch.int32))
                self._decode.inputs.full_table[place.row, : len(view.full_blocks)].copy_(table, non_blocking=True)
                self._tables[place.row] = known


def _with_logprobs(
    choice: TokenChoice | ServingError, wanted: DeviceSampling | None, side: _HostSide, at: int
) -> TokenChoice | ServingError:
    if isinstance(choice, ServingError):
        return choice
    assert wanted is not None
    assert wanted.logprobs is not None
    chosen, *values = side.logprobs[at, : 1 + wanted.logprobs].tolist()
    return replace(choice, logprobs=told_logprobs(chosen, values, side.likeliest[at, : wanted.logprobs].tolist()))


def _source(view: SequenceView, follows: bool, place: Place) -> int:
    """Where the row's token is: in a row of the step before, or with us."""
    if not follows:
        return -1 - view.token_ids[0]
    assert place.before is not None  # the step before picked its token
    return place.before
