"""MXFP4 in torch: fake-quantisation for training, and the exact bytes of the checkpoint.

Groups of 32 along the last axis share one power-of-two scale (byte e stands for 2^(e - 127)); a value is one e2m1
nibble, the even element of a pair in the low half of its byte. Called by `network` while training and by `pack`.
"""

import torch

from tools.tiny_gpt_oss.sample import DataError

GROUP = 32
_MAX_MAGNITUDE = 6.0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _scale_bytes(groups: torch.Tensor) -> torch.Tensor:
    """Biased exponent of each group's scale: floor(log2(largest magnitude)) - 2, read from the fp32 bits."""
    largest = groups.abs().amax(-1)
    return (((largest.view(torch.int32) >> 23) & 255) - 2).clamp(1, 254)


def _scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    return (scale_bytes.to(torch.int32) << 23).view(torch.float32)


def _round_magnitude(magnitude: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 magnitude; above 6 it saturates."""
    magnitude = magnitude.clamp(max=_MAX_MAGNITUDE)
    fine = torch.round(magnitude * 2) / 2
    return torch.where(magnitude < 2, fine, torch.where(magnitude < 4, torch.round(magnitude), torch.round(magnitude / 2) * 2))


def quantise(weight: torch.Tensor) -> torch.Tensor:
    """The MXFP4 values of `weight` as fp32, same shape.

    Shapes: weight [..., K] fp32, K a multiple of 32. Applying it twice changes nothing.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, GROUP)
    scale = _scales(_scale_bytes(groups))[..., None]
    return (torch.sign(groups) * _round_magnitude(groups.abs() / scale) * scale).reshape(weight.shape)


def fake_quantise(weight: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """`weight` moved to its MXFP4 values by `share` (0-dim, 0 or 1); the gradient passes straight through."""
    return weight + (share * (quantise(weight) - weight)).detach()


def pack_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Checkpoint bytes of a weight.

    Shapes: weight [..., K] fp32. Returns: blocks [..., K/32, 16] uint8, scales [..., K/32] uint8
    """
    if weight.shape[-1] % GROUP:
        raise DataError(f"the last axis must be a multiple of {GROUP}, got shape {tuple(weight.shape)}")
    groups = weight.float().reshape(*weight.shape[:-1], -1, GROUP)
    scale_bytes = _scale_bytes(groups)
    magnitude = _round_magnitude(groups.abs() / _scales(scale_bytes)[..., None])
    code = torch.bucketize(magnitude, torch.tensor(_MAGNITUDES)).to(torch.uint8)
    code = torch.where((groups < 0) & (code > 0), code | 8, code)
    return code[..., 0::2] | (code[..., 1::2] << 4), scale_bytes.to(torch.uint8)


def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 values [..., K] of checkpoint bytes; the inverse of `pack_mxfp4`."""
    table = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    code = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    return (table[code] * _scales(scales)[..., None]).flatten(-2)
