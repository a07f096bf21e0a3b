"""`transformers`' gpt-oss on a CPU in fp32, from the same tensors as our checkpoint: what parity is measured against."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.fixture import dense_tensors


def build_hf_model(config: ModelConfig, tensors: dict[str, Tensor]) -> Any:
    """Returns: GptOssForCausalLM, eager attention, fp32"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GptOssConfig, GptOssForCausalLM

        hf_config = GptOssConfig(
            num_hidden_layers=config.num_layers,
            num_local_experts=config.num_experts,
            num_experts_per_tok=config.experts_per_token,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            head_dim=config.head_dim,
            num_attention_heads=config.num_qo_heads,
            num_key_value_heads=config.num_kv_heads,
            sliding_window=config.window_tokens,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": config.rope_theta,
                "factor": config.rope_factor,
                "beta_fast": config.rope_beta_fast,
                "beta_slow": config.rope_beta_slow,
                "truncate": False,
                "original_max_position_embeddings": config.rope_original_context,
            },
            swiglu_limit=config.swiglu_limit,
            tie_word_embeddings=False,
            attention_bias=True,
            eos_token_id=2,
            pad_token_id=1,
        )
        hf_config._attn_implementation = "eager"
        with torch.device("meta"):
            model = GptOssForCausalLM(hf_config)
        model = model.to_empty(device="cpu").eval().float()
        model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)  # its buffers are computed, not loaded
    model.load_state_dict({name: tensor.float() for name, tensor in dense_tensors(config, tensors).items()})
    return model


@torch.no_grad()
def hf_logits(model: Any, token_ids: list[int]) -> Tensor:
    """Returns: [T, V] fp32, all positions at once, no cache"""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


@torch.no_grad()
def hf_greedy(model: Any, token_ids: list[int], num_new: int) -> list[int]:
    """Returns: the next `num_new` tokens, end-of-sequence ignored, with transformers' own cache"""
    out = model(torch.tensor([token_ids]), use_cache=True)
    tokens = []
    for _ in range(num_new):
        tokens.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([[tokens[-1]]]), cache=out.past_key_values, use_cache=True)
    return tokens
