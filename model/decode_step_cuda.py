"""The decode step of a GPU rank: running sequences into the rows of the captured step, its tokens out, in one upload and one download.

Owns which sequence lies in which row and what the device knows of it. Tokens are sampled on the GPU; a row that wants log-probabilities or
has masks, bias or penalties is sampled from its logits on the CPU, by the same reference as everywhere. Called by the decode executor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.errors import ServingError
from kernels.sampling_cuda import BAD_LOGITS
from model.batch import SequenceView
from model.decode_cuda import BUCKETS, CudaDecode
from model.sampling import GREEDY, DeviceSampling, SamplingState, TokenChoice, sample


class CudaDecodeStep:
    """Rows of a step in the order of the plan; what a row held before counts, so that only changes travel.

    Units: max_batch: most sequences at once
    """

    def __init__(self, decode: CudaDecode, max_batch: int):
        self._decode = decode
        self._buckets = [b for b in BUCKETS if b < max_batch] + [max_batch]
        self._host = torch.zeros_like(decode.inputs.packed, device="cpu", pin_memory=decode.inputs.packed.is_cuda)
        self._arrays = [view.numpy() for view in decode.inputs.split(self._host)]  # over the same memory
        self._tables: list[tuple[int, int]] = [(0, 0)] * max_batch  # (key, blocks) of the row's full table on the device
        self._sampling: list[DeviceSampling] = [GREEDY] * max_batch

    def capture(self) -> None:
        """Records the graphs of all buckets. Effects: all rows are padded ones meanwhile; takes seconds"""
        for bucket in reversed(self._buckets):  # the largest first: the others fit into its memory
            for all_greedy in (True, False):
                self._decode.capture(bucket, all_greedy=all_greedy)

    def step(
        self, views: Sequence[SequenceView], keys: Sequence[int], states: Sequence[SamplingState] | None
    ) -> list[TokenChoice | ServingError] | None:
        """As `model/decode_step.py` says."""
        rows = len(views)
        bucket = next(b for b in self._buckets if b >= rows)
        self._write_rows(views, keys)
        wanted = [state.on_device() for state in states] if states is not None else [GREEDY] * rows
        sampling = [w or GREEDY for w in wanted]
        self._write_sampling(sampling)
        inputs = self._decode.inputs
        inputs.packed.copy_(self._host, non_blocking=True)
        self._decode.run(bucket, all_greedy=all(s.temperature == 0 for s in sampling))
        tokens = inputs.token_ids[:rows].tolist()  # waits for the step
        if states is None:
            return None
        choices: list[TokenChoice | ServingError] = [
            TokenChoice(token)
            if token != BAD_LOGITS
            else ServingError(f"the model's logits for output token {state.num_output} are not finite")
            for token, state in zip(tokens, states, strict=True)
        ]
        on_host = [row for row in range(rows) if wanted[row] is None]
        if on_host:
            logits = self._decode.logits[on_host].cpu()
            for row, choice in zip(on_host, sample(logits, [states[row] for row in on_host]), strict=True):
                choices[row] = choice
        return choices

    def _write_rows(self, views: Sequence[SequenceView], keys: Sequence[int]) -> None:
        rows, (token_ids, seq_lens, sliding_start, sliding_table) = len(views), self._arrays
        width = sliding_table.shape[1]
        token_ids[:rows] = [view.token_ids[0] for view in views]
        seq_lens[:rows] = [view.start + 1 for view in views]
        seq_lens[rows:] = 0
        sliding_start[:rows] = [view.sliding_first * self._decode.block_size for view in views]
        sliding_table[:rows] = [[*view.sliding_blocks, *[0] * (width - len(view.sliding_blocks))] for view in views]
        for row, (view, key) in enumerate(zip(views, keys, strict=True)):
            known, blocks = self._tables[row], len(view.full_blocks)
            if known != (key, blocks):
                first = known[1] if known[0] == key and known[1] < blocks else 0
                added = torch.tensor(view.full_blocks[first:], dtype=torch.int32)
                self._decode.inputs.full_table[row, first:blocks].copy_(added)
                self._tables[row] = (key, blocks)

    def _write_sampling(self, wanted: list[DeviceSampling]) -> None:
        if wanted == self._sampling[: len(wanted)]:
            return
        self._sampling[: len(wanted)] = wanted
        rows = self._decode.inputs.sampling
        for name in DeviceSampling.__dataclass_fields__:
            target = getattr(rows, name)
            target.copy_(torch.tensor([getattr(s, name) for s in self._sampling], dtype=target.dtype))
