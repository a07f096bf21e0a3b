"""Which part of each tensor a rank holds. Pure arithmetic; the loader and the tests read it.

Attention is cut by heads, the vocabulary by rows, and experts are either dealt out whole (`ep` = `tp`) or each cut along its
intermediate axis (`ep` = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.kv_layout import head_range
from model.config import ModelConfig, check_layout


@dataclass(frozen=True)
class RankCut:
    """Global index ranges of one rank.

    `intermediate` may be empty on the last ranks of a small model; `adds_down_bias`: exactly one rank adds an expert's down bias.
    """

    qo_heads: range
    kv_heads: range
    experts: range
    intermediate: range
    vocab: range
    adds_down_bias: bool


def cut_for_rank(config: ModelConfig, *, tp: int, ep: int, rank: int, granule: int) -> RankCut:
    """Cuts the model for one rank.

    Units: granule: the intermediate axis is cut on multiples of it (32 for an MXFP4 group, 128 for an FP8 block)
    Raises: ConfigError if the model can't be cut this way
    """
    check_layout(config, tp, ep)
    heads = head_range(config.num_kv_heads, tp, rank)
    per_rank = config.num_qo_heads // tp
    experts = config.num_experts // ep
    whole_experts = ep == tp
    return RankCut(
        qo_heads=range(rank * per_rank, (rank + 1) * per_rank),
        kv_heads=range(heads.start, heads.start + heads.count),
        experts=range(rank * experts, (rank + 1) * experts) if whole_experts else range(config.num_experts),
        intermediate=range(config.intermediate_size) if whole_experts else _even_granules(config.intermediate_size, granule, tp, rank),
        vocab=_equal_rows(config.vocab_size, tp, rank),
        adds_down_bias=whole_experts or rank == 0,
    )


def vocab_rows_per_rank(vocab_size: int, tp: int) -> int:
    """Rows of the vocabulary on every rank but the last ones, which may hold fewer."""
    return -(-vocab_size // tp)


def _equal_rows(vocab_size: int, tp: int, rank: int) -> range:
    rows = vocab_rows_per_rank(vocab_size, tp)
    return range(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def _even_granules(size: int, granule: int, parts: int, index: int) -> range:
    """Part `index` of `size`, cut on multiples of the granule, the first parts one granule longer where it doesn't divide."""
    count, extra = divmod(-(-size // granule), parts)
    start = index * count + min(index, extra)
    stop = start + count + (index < extra)
    return range(min(start * granule, size), min(stop * granule, size))
