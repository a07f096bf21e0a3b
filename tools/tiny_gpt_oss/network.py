"""gpt-oss in small as a torch module for training: same formulas and parameter names as the checkpoint.

Differs from a serving model in two ways: all experts are computed and weighted (dense, cheap at this size), and the
expert weights can be fake-quantised to MXFP4. Vocabulary rows are the compact ones. Used by `train` and `generate`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny_gpt_oss.attention import Attend, attend_explicit, rope_tables, rotate, yarn_inverse_frequencies
from tools.tiny_gpt_oss.mxfp4 import fake_quantise

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
NORM_EPS = 1e-5
_ROW_MULTIPLE = 64


@dataclass(frozen=True)
class TinyConfig:
    """Sizes. `vocabulary_rows` counts the compact rows; the rest are gpt-oss names."""

    vocabulary_rows: int
    hidden_size: int = 256
    intermediate_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_local_experts: int = 8
    num_experts_per_tok: int = 4

    @property
    def padded_rows(self) -> int:
        return -(-self.vocabulary_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE


class KeyValueCache:
    """Keys and values of one layer, slot = position. Owned by one generation batch."""

    def __init__(self, batch: int, slots: int, heads: int, head_dim: int, like: Tensor) -> None:
        self.key = like.new_zeros(batch, slots, heads, head_dim)
        self.value = like.new_zeros(batch, slots, heads, head_dim)

    def extend(self, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [B, T, K, D] at positions [B, T]; returns all slots."""
        row = torch.arange(key.shape[0], device=key.device)[:, None]
        self.key[row, positions] = key
        self.value[row, positions] = value
        return self.key, self.value


class Linear(nn.Module):
    """Weight [out, in] and bias in fp32, used in the dtype of the input."""

    def __init__(self, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * std)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        std = config.hidden_size**-0.5
        width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = Linear(config.hidden_size, width, std)
        self.k_proj = Linear(config.hidden_size, kv_width, std)
        self.v_proj = Linear(config.hidden_size, kv_width, std)
        self.o_proj = Linear(width, config.hidden_size, width**-0.5 / math.sqrt(2 * config.num_hidden_layers))
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: object, attend: Attend, cache: KeyValueCache | None, positions: Tensor
    ) -> Tensor:
        query, key, value = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, *rope), rotate(key, *rope)
        if cache is not None:
            key, value = cache.extend(key, value, positions)
        return self.o_proj(attend(query, key, value, self.sinks, mask).flatten(-2))


class Experts(nn.Module):
    """Weights in checkpoint order: gate_up_proj [E, 2I, H] with gate and up rows interleaved, down_proj [E, H, I]."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        out_std = inner**-0.5 / math.sqrt(2 * config.num_hidden_layers)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * inner))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner) * out_std)
        self.down_proj_bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, x: Tensor, route: Tensor, quantised_share: Tensor) -> Tensor:
        """x [B, T, H], route [B, T, E] (0 for experts not chosen) -> [B, T, H]."""
        gate_up = fake_quantise(self.gate_up_proj, quantised_share).to(x.dtype)
        down = fake_quantise(self.down_proj, quantised_share).to(x.dtype)
        bias = self.gate_up_proj_bias.to(x.dtype)
        gate, up = (F.linear(x, gate_up[:, half::2].flatten(0, 1), bias[:, half::2].flatten()).float() for half in (0, 1))
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        inner = ((up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)).unflatten(-1, (route.shape[-1], -1))
        weighted = (inner * route[..., None]).flatten(-2).to(x.dtype)
        mixed_bias = route.to(x.dtype) @ self.down_proj_bias.to(x.dtype)
        return weighted @ down.transpose(1, 2).flatten(0, 1) + mixed_bias


class MixtureOfExperts(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.chosen = config.num_experts_per_tok
        self.router = Linear(config.hidden_size, config.num_local_experts, config.hidden_size**-0.5)
        self.experts = Experts(config)

    def forward(self, x: Tensor, quantised_share: Tensor) -> tuple[Tensor, Tensor]:
        """(output, load-balance loss: 1 when the experts are used evenly)."""
        logits = self.router(x).float()
        index = torch.arange(logits.shape[-1], device=x.device)
        mine, other = logits[..., :, None], logits[..., None, :]
        ahead = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
        is_chosen = ahead.sum(-1) < self.chosen
        route = logits.masked_fill(~is_chosen, -torch.inf).softmax(-1)
        used = is_chosen.float().flatten(0, -2).mean(0) / self.chosen
        balance = logits.shape[-1] * (used * logits.softmax(-1).flatten(0, -2).mean(0)).sum()
        return self.experts(x, route, quantised_share), balance


class Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = MixtureOfExperts(config)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: object,
        attend: Attend,
        quantised_share: Tensor,
        cache: KeyValueCache | None,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, attend, cache, positions)
        mixed, balance = self.mlp(self.post_attention_layernorm(x), quantised_share)
        return x + mixed, balance


class TinyGptOss(nn.Module):
    """The model over compact vocabulary rows. `layers` in `forward` may be compiled versions of its own."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.padded_rows, config.hidden_size)
        self.model.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.model.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.padded_rows, bias=False)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.3)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.register_buffer("inverse_frequencies", yarn_inverse_frequencies(config.head_dim), persistent=False)

    def forward(
        self,
        rows: Tensor,
        positions: Tensor,
        masks: tuple[object, object],
        quantised_share: Tensor,
        *,
        attend: Attend = attend_explicit,
        caches: Sequence[KeyValueCache] | None = None,
        layers: Sequence[Callable] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states before the last norm, and the mean load-balance loss.

        Shapes: rows, positions [B, T] int64; masks (sliding, full) as `attend` wants them; quantised_share 0-dim
        Returns: [B, T, hidden_size] in `dtype`, 0-dim fp32
        """
        x = F.embedding(rows, self.model.embed_tokens.weight).to(dtype)
        rope = rope_tables(positions, self.inverse_frequencies)
        balances = []
        for index, layer in enumerate(layers or self.model.layers):
            cache = None if caches is None else caches[index]
            x, balance = layer(x, rope, masks[index % 2], attend, quantised_share, cache, positions)
            balances.append(balance)
        return x, torch.stack(balances).mean()

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., padded_rows] of hidden states."""
        normed = self.model.norm(hidden)
        return F.linear(normed, self.lm_head.weight.to(normed.dtype)).float()
