"""The next words of up to 16 rows without reading all of the vocabulary's weights: half their bytes, the same words.

An 8-bit copy of the weights gives each logit with a bound of its error, by the Cauchy-Schwarz inequality; only words whose upper bound
reaches the largest lower bound can win, greedily or with the noise that samples them, and their logits are computed from the bf16 weights.
Why and at what price: docs/decisions/screened-words.md. Owns that copy's layout, the kernels' buffers and the plain twins. Called by
`model/decode_cuda.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cuda_library
from kernels.sampling_cuda import SamplingRows, sample_ref

MAX_SCREENED_TOKENS = 16
PARTS = 64
NO_FLOOR = -(2**31)
_CODES, _LEVELS, _UNIT_COLUMNS = 127, 32639, 64
_CLIPS = (1.0, 0.85, 0.7, 0.55, 0.4)  # shares of a row's largest weight that its codes may reach; the one that misses least is taken
_ROWS_AT_ONCE = 8192
_LIBRARY_ROUNDING = 4e-4  # of fp32 sums in any order, as a share of both norms: 2,880 additions of 2^-23 are 3.4e-4


@dataclass(frozen=True)
class Screen:
    """An 8-bit copy of `[V, C]` weights and what bounds its error.

    Shapes: codes [ceil(V / 16), C / 64, 2, 32, 16] int8: rows g and g + 8 of a tile, lane 4 g + c holds columns 16 c .. of a unit's 64
    Shapes: terms [V, 4] fp32: scale of a row's codes; norm of what they miss; norm of the row; 0
    Units: largest_norm of any row
    """

    codes: Tensor
    terms: Tensor
    largest_norm: float


@dataclass(frozen=True)
class ScreenScratch:
    """Shapes: floors, arrived [B] int32 (NO_FLOOR and zero between launches); part_best fp32, part_id int32 [B, 64]"""

    floors: Tensor
    arrived: Tensor
    part_best: Tensor
    part_id: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str) -> ScreenScratch:
        return cls(
            torch.full((rows,), NO_FLOOR, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.empty(rows, PARTS, dtype=torch.float32, device=device),
            torch.empty(rows, PARTS, dtype=torch.int32, device=device),
        )


def make_screen(weight: Tensor) -> Screen:
    """Shapes: weight [V, C] bf16, C in whole 64s. Effects: V x C bytes more on the device, half a gigabyte more meanwhile."""
    rows, columns = weight.shape
    tiles, units = -(-rows // 16), columns // _UNIT_COLUMNS
    codes = torch.zeros(tiles, units, 2, 32, 16, dtype=torch.int8, device=weight.device)
    terms = torch.zeros(rows, 4, dtype=torch.float32, device=weight.device)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = weight[start : start + _ROWS_AT_ONCE].float()
        values, scale, missed = _quantize_rows(part)
        terms[start : start + len(part), 0] = scale
        terms[start : start + len(part), 1] = missed * 1.0001  # the norms are sums in fp32 themselves
        terms[start : start + len(part), 2] = part.norm(dim=1) * 1.0001
        padded = torch.zeros(-(-len(part) // 16) * 16, columns, dtype=torch.int8, device=weight.device)
        padded[: len(part)] = values
        laid_out = padded.view(-1, 2, 8, units, 4, 16).permute(0, 3, 1, 2, 4, 5)  # tile, unit, half, g, c, byte
        codes[start // 16 : start // 16 + len(laid_out)] = laid_out.reshape(len(laid_out), units, 2, 32, 16)
    return Screen(codes, terms, float(terms[:, 2].max()))


def _quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns: int8 codes [R, C]; their scales [R]; the norms of what they miss [R]"""
    most = rows.abs().amax(dim=1)
    best = torch.full_like(most, torch.inf)
    codes, scales = torch.zeros_like(rows, dtype=torch.int8), torch.zeros_like(most)
    for clip in _CLIPS:
        scale = most * (clip / _CODES)
        values = (rows / scale.clamp(min=1e-30)[:, None]).round().clamp(-_CODES, _CODES)
        missed = (rows - values * scale[:, None]).norm(dim=1)
        taken = ~(missed >= best)  # a row that is not finite keeps its last try, whose norm is not finite either
        best, scales = torch.where(taken, missed, best), torch.where(taken, scale, scales)
        codes = torch.where(taken[:, None], values.to(torch.int8), codes)
    return codes, scales, best


def choose_words(
    x: Tensor,
    weight: Tensor,
    screen: Screen,
    rows: SamplingRows,
    seq_lens: Tensor,
    *,
    bounds: Tensor,
    scratch: ScreenScratch,
    tokens: Tensor,
    best: Tensor,
) -> None:
    """The next word of each row, greedy or sampled by its temperature alone; the lower id of equal ones.

    Shapes: x [B, C], weight [V, C] bf16, B up to 16; seq_lens [B] int32, 0 for a padded row; bounds [B, V] fp32 scratch
    Shapes: tokens [B] int32 out: a word, BAD_LOGITS where a logit is NaN or infinite, 0 for padded rows
    Shapes: best [B, P] fp32, the first of a row out: the word's logit, or logit / temperature + noise
    Units: rows: without filters, but for rows nobody looks at
    Effects: two kernels; no host sync; capturable
    """
    if not cuda_library.runs(x):
        logits = x.float() @ weight.float().t()
        tokens.copy_(sample_ref(logits, rows, seq_lens))
        best[:, 0] = logits.gather(1, tokens.clamp(min=0).long().to(logits.device)[:, None])[:, 0]
        return
    launch_screen(x, screen, rows, seq_lens, bounds, scratch)
    launch_rescore(x, weight, bounds, scratch, rows, seq_lens, tokens, best)


def settle_ties(
    x: Tensor,
    weight: Tensor,
    screen: Screen,
    logits: Tensor,
    rows: SamplingRows,
    seq_lens: Tensor,
    *,
    scratch: ScreenScratch,
    tokens: Tensor,
    best: Tensor,
) -> None:
    """After `sample_tokens` over `logits` from the library: rows without filters get the word that `choose_words` gives them, should
    rounding decide between words.

    Shapes: logits [B, V] fp32; tokens, best: as `sample_tokens` left them; the others as in `choose_words`
    Effects: one kernel; no host sync; capturable
    """
    if cuda_library.runs(x):
        slack = _LIBRARY_ROUNDING * screen.largest_norm
        launch_rescore(x, weight, logits, scratch, rows, seq_lens, tokens, best, slack=slack)


def launch_screen(x, screen: Screen, rows: SamplingRows, seq_lens, bounds, scratch: ScreenScratch) -> None:
    """Upper bounds of all logits, and in `scratch.floors` the largest lower bound. Raises: KernelError for more than 16 rows"""
    device = x.device.index or 0
    cuda_library.call(
        "vocabulary", "tandem_screen", x, screen.codes, screen.terms, rows.temperature, rows.seed, seq_lens, bounds, scratch.floors,
        *x.shape, screen.terms.shape[0], cuda_library.multiprocessors(device),
    )  # fmt: skip


def launch_rescore(
    x, weight, bounds, scratch: ScreenScratch, rows: SamplingRows, seq_lens, tokens, best, *, slack: float | None = None
) -> None:
    """The choice among words whose bound reaches the floor; `slack` None: the floor is `scratch.floors`."""
    cuda_library.call(
        "vocabulary", "tandem_rescore", x, weight, bounds, scratch.floors if slack is None else None, rows.temperature, rows.top_k,
        rows.top_p, rows.min_p, rows.seed, seq_lens, tokens, best, scratch.part_best, scratch.part_id, scratch.arrived, *x.shape,
        weight.shape[0], PARTS, best.shape[1], slack or 0.0,
    )  # fmt: skip


def screen_ref(x: Tensor, screen: Screen) -> tuple[Tensor, Tensor]:
    """Plain twin of the first kernel. Returns: upper and lower bounds of the logits, each [B, V] fp32"""
    tiles, units = screen.codes.shape[:2]
    codes = screen.codes.view(tiles, units, 2, 8, 4, 16).permute(0, 2, 3, 1, 4, 5).reshape(tiles * 16, units * _UNIT_COLUMNS)
    scale, missed, norm, _ = screen.terms.unbind(1)
    x = x.float()
    step = x.abs().amax(dim=1, keepdim=True) / _LEVELS
    digits = (x / step.clamp(min=1e-30)).round()
    value = (scale * step).double() * (digits.double() @ codes[: len(scale)].double().t())
    x_norm, x_missed = x.norm(dim=1, keepdim=True), 0.51 * step * x.shape[1] ** 0.5
    off = 1.001 * (missed * x_norm + norm * x_missed) + norm * x_norm / 65536 + value.abs() / 2**20
    return (value + off).float(), (value - off).float()
