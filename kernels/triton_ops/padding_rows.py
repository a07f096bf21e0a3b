"""Zeros in the rows of an expert buffer that no token owns, so that a grouped GEMM's tensor cores multiply zeros there: less power."""

import torch
import triton
import triton.language as tl


@triton.jit
def _zero_padding_rows(
    q_ptr, ends_ptr, WORDS: tl.constexpr, PADDED_WORDS: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    end = tl.load(ends_ptr + tl.program_id(0))
    stop = (end + ALIGN - 1) // ALIGN * ALIGN
    word = tl.arange(0, PADDED_WORDS)
    zeros = tl.zeros((PADDED_WORDS,), dtype=tl.int32)
    for i in tl.static_range(ROWS):
        row = end + tl.program_id(1) * ROWS + i
        tl.store(q_ptr + row.to(tl.int64) * WORDS + word, zeros, mask=(word < WORDS) & (row < stop))


def launch_zero_padding_rows(q, ends, alignment: int, *, rows: int = 8) -> None:
    """q [M, P] fp8; ends [E] int32: from each expert's end to the next multiple of `alignment`, rows become zero."""
    words = q.shape[1] // 4
    _zero_padding_rows[(ends.shape[0], triton.cdiv(alignment, rows))](
        q.view(dtype=torch.int32), ends, WORDS=words, PADDED_WORDS=triton.next_power_of_2(words), ALIGN=alignment, ROWS=rows, num_warps=4
    )
