"""RMSNorm with what stands before it (residual add, expert combine) and after it (FP8 quantisation) in one pass per row."""

import triton
import triton.language as tl

from kernels.triton_ops.quantize import store_row_fp8


@triton.jit
def _normalize(x, weight_ptr, column, eps, COLUMNS: tl.constexpr):
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / COLUMNS + eps)
    weight = tl.load(weight_ptr + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    return x * inverse_rms * weight, inverse_rms


@triton.jit(do_not_specialize=["scale_stride"])
def _add_norm_quantize(
    residual_ptr, delta_ptr, bias_ptr, weight_ptr, q_ptr, scale_ptr, inverse_rms_ptr, scale_stride, eps,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_INVERSE: tl.constexpr, FP8: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, PADDED_GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < COLUMNS
    at = row.to(tl.int64) * COLUMNS + column
    x = tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    x, inverse_rms = _normalize(x, weight_ptr, column, eps, COLUMNS)
    if HAS_INVERSE:
        tl.store(inverse_rms_ptr + row, inverse_rms)
    if FP8:
        store_row_fp8(x, group, column, q_ptr, scale_ptr, row, scale_stride, COLUMNS, GROUPS, BIAS)
    else:
        tl.store(q_ptr + at, x.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["scale_stride"])
def _combine_norm_quantize(
    residual_ptr, y_ptr, rows_ptr, expert_weights_ptr, weight_ptr, bias_ptr, q_ptr, scale_ptr, scale_stride, eps,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, PADDED_GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = column < COLUMNS
    at = row.to(tl.int64) * COLUMNS + column
    total = tl.zeros((PADDED_GROUPS, 128), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        source = tl.load(rows_ptr + row * TOP_K + k)
        share = tl.load(expert_weights_ptr + row * TOP_K + k)
        y = tl.load(y_ptr + source.to(tl.int64) * COLUMNS + column, mask=mask & (source >= 0), other=0.0).to(tl.float32)
        total += y * share
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(residual_ptr.dtype.element_ty)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(residual_ptr + at, total.to(residual_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(residual_ptr + at, rounded, mask=mask)
    if HAS_NORM:
        x, _ = _normalize(rounded.to(tl.float32), weight_ptr, column, eps, COLUMNS)
        if FP8:
            store_row_fp8(x, group, column, q_ptr, scale_ptr, row, scale_stride, COLUMNS, GROUPS, 0)
        else:
            tl.store(q_ptr + at, x.to(q_ptr.dtype.element_ty), mask=mask)


def launch_add_norm_quantize(residual, delta, delta_bias, weight, q, scales, inverse_rms, eps: float, bias_columns: int) -> None:
    """residual [T, C] (updated when delta is given); delta [T, C] or None; inverse_rms [T] fp32 or None: filled.

    With scales [T, P/128], or [T, 1] with bias columns: q [T, P] fp8; without: q [T, C] takes the norm itself.
    """
    rows, columns = residual.shape
    fp8 = scales is not None
    groups = q.shape[1] // 128 if fp8 else triton.cdiv(columns, 128)  # bias columns after whole groups are a group more
    _add_norm_quantize[(rows,)](
        residual, residual if delta is None else delta, weight if delta_bias is None else delta_bias, weight, q, scales if fp8 else q,
        weight if inverse_rms is None else inverse_rms, scales.stride(1) if fp8 else 0, eps,
        COLUMNS=columns, GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups), HAS_DELTA=delta is not None,
        HAS_BIAS=delta_bias is not None, HAS_INVERSE=inverse_rms is not None, FP8=fp8, BIAS=bias_columns, num_warps=4,
    )  # fmt: skip


def launch_combine_norm_quantize(
    residual, y, rows, expert_weights, weight, q, scales, eps: float, *, add_residual: bool, stream_bias=None
) -> None:
    """residual [T, C] becomes (residual +) sum of shares; with `weight` its norm goes to q: fp8 [T, P] with scales, [T, C] without.

    `stream_bias` [C] is added to what is stored, behind the norm's back.
    """
    tokens, columns = residual.shape
    has_norm, fp8 = weight is not None, scales is not None
    groups = scales.shape[1] if fp8 else triton.cdiv(columns, 128)
    _combine_norm_quantize[(tokens,)](
        residual, y, rows, expert_weights, weight if has_norm else residual, residual if stream_bias is None else stream_bias,
        q if has_norm else residual, scales if fp8 else expert_weights, scales.stride(1) if fp8 else 0, eps,
        COLUMNS=columns, GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups), TOP_K=rows.shape[1],
        HAS_RESIDUAL=add_residual, HAS_NORM=has_norm, HAS_BIAS=stream_bias is not None, FP8=fp8, num_warps=4,
    )  # fmt: skip
