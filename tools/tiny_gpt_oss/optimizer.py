"""Muon for the weight matrices and AdamW for the rest, with one shared schedule.

Owns the split of the parameters and the update rules, not the schedule's clock. Called by `train`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


def orthogonalise(update: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly, of each matrix in update [N, rows, columns]; computed in bf16."""
    a, b, c = _NEWTON_SCHULZ
    x = update.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    x = x / (x.float().flatten(1).norm(dim=1)[:, None, None] + 1e-7).bfloat16()
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; 3-D parameters are stacks of matrices. Same shapes go in one batch.

    The update is scaled to the root mean square of an Adam step (factor 0.2 * sqrt(longer side)), so that both
    optimizers can share learning rates.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(shape, parameters, group)

    def _step_shape(self, shape: torch.Size, parameters: list[nn.Parameter], group: dict) -> None:
        gradients = [p.grad for p in parameters]
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter]["moment"] = torch.zeros_like(parameter)
        moments = [self.state[p]["moment"] for p in parameters]
        torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, moments, group["momentum"])
        stacked = torch.stack(nesterov).reshape(-1, *shape[-2:])
        scale = 0.2 * max(shape[-2:]) ** 0.5
        updates = orthogonalise(stacked).reshape(len(parameters), *shape)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(updates.unbind()), alpha=-group["lr"] * scale)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates and decay."""

    matrix_lr: float = 4e-3
    other_lr: float = 3e-3
    matrix_decay: float = 0.05
    clip_norm: float = 1.0


class Optimizers:
    """Both optimizers behind one step."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        is_matrix = {
            name: parameter.ndim >= 2
            and not name.endswith("_bias")
            and not any(part in name for part in ("embed_tokens", "lm_head", "router"))
            for name, parameter in model.named_parameters()
        }
        self._clip_norm = rates.clip_norm
        self._others = [p for name, p in model.named_parameters() if not is_matrix[name]]
        matrices = [p for name, p in model.named_parameters() if is_matrix[name]]
        self._muon = Muon(matrices, lr=rates.matrix_lr, weight_decay=rates.matrix_decay)
        is_cuda = self._others[0].is_cuda
        self._adam = torch.optim.AdamW(self._others, lr=rates.other_lr, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=is_cuda)
        self._peaks = [(g, g["lr"]) for optimizer in (self._muon, self._adam) for g in optimizer.param_groups]

    def step(self, lr_share: float) -> None:
        """One update at `lr_share` of the peak rates; clears the gradients."""
        for group, peak in self._peaks:
            group["lr"] = peak * lr_share
        nn.utils.clip_grad_norm_(self._others, self._clip_norm)
        self._muon.step()
        self._adam.step()
        self._muon.zero_grad(set_to_none=True)
        self._adam.zero_grad(set_to_none=True)


def lr_share(step: int, progress: float, warmup_steps: int = 150, decay_from: float = 0.5) -> float:
    """Warm-up by steps, then constant, then linear to 0 by progress (0 to 1 of the training time)."""
    return min(1.0, (step + 1) / warmup_steps) * min(1.0, max(0.0, (1 - progress) / (1 - decay_from)))
