"""FP8 row quantisation in registers: the helper that every fused pass ends with, and the plain pass.

Legend: G groups of 128 columns, padded to a power of two. Scales are stored group-major with row stride 1, as DeepGEMM's TMA loads want
them. Numbers that change with the prompt are not specialised on, so that a new length compiles nothing.
"""

import triton
import triton.language as tl


@triton.jit
def group_scales(x, EVEN: tl.constexpr):
    """x [G, 128] fp32 of one row -> the scale of each group; EVEN: the same for all of them, a power of two >= 2^-8."""
    scale = tl.max(tl.abs(x), axis=1) * (1.0 / 448.0)
    if EVEN:
        largest = tl.maximum(scale * 0.0 + tl.max(scale, axis=0), 0.00390625)
        return ((largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
    return tl.where(scale > 0, scale, 1.0)


@triton.jit
def store_row_fp8(x, group, column, q_ptr, scale_ptr, row, scale_stride, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, BIAS: tl.constexpr):
    """Quantises one row held as x [G, 128] fp32 (zeros past COLUMNS); stores payload and scales, with bias columns one for all groups."""
    scale = group_scales(x, BIAS > 0)
    inverse = 1.0 / scale
    q = x * inverse[:, None]
    if BIAS:
        q = tl.where((column >= COLUMNS) & (column < COLUMNS + BIAS), inverse[:, None], q)
    tl.store(q_ptr + row.to(tl.int64) * (GROUPS * 128) + column, q.to(q_ptr.dtype.element_ty), mask=column < GROUPS * 128)
    tl.store(scale_ptr + group * scale_stride + row, scale, mask=group < (1 if BIAS else GROUPS))


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_rows(
    x_ptr, q_ptr, scale_ptr, x_stride, scale_stride,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, PADDED_GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    store_row_fp8(x, group, column, q_ptr, scale_ptr, row, scale_stride, COLUMNS, GROUPS, BIAS)


def launch_quantize_rows(x, q, scales, bias_columns: int) -> None:
    """x [T, C]; q [T, P] fp8; scales [T, P/128], or [T, 1] with bias columns, fp32 with row stride 1: filled."""
    rows, columns = x.shape
    groups = q.shape[1] // 128
    _quantize_rows[(rows,)](
        x, q, scales, x.stride(0), scales.stride(1),
        COLUMNS=columns, GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups), BIAS=bias_columns, num_warps=4,
    )  # fmt: skip
