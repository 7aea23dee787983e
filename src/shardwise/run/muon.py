"""Muon for the matrices between the layers of a model, AdamW for the rest, as one optimizer: ``optim.name=muon``.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) makes the update of a matrix orthogonal. Embeddings, the
head, biases and norms are for another optimizer. Its steps are scaled so that they are as large as AdamW's (Liu et al. 2025,
arXiv:2502.16982), and one learning rate and weight decay suit both.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.model.names import canonical_modules


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for some parameter groups and ``torch.optim.AdamW`` for the others, which step together.

    Args:
        lr: learning rate of groups without one.
        weight_decay: weight decay of groups without one.
        betas: of AdamW.
        fused: of AdamW.
    """

    def __init__(
        self,
        hidden: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        fused: bool,
    ):
        self._parts: dict[bool, torch.optim.Optimizer] = {}
        if hidden:
            self._parts[True] = torch.optim.Muon(
                hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        if others:
            self._parts[False] = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, fused=fused)
        for is_muon, part in self._parts.items():
            for group in part.param_groups:
                group["muon"] = is_muon
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for is_muon, part in self._parts.items():
            # Loading a state dict replaces groups and state: what is stepped is always this object's.
            part.param_groups = [group for group in self.param_groups if group["muon"] is is_muon]
            part.state = self.state
            part.step()
        return loss


def is_hidden_matrix(model: nn.Module) -> Callable[[Any], bool]:
    """A function that says whether a parameter is for Muon: a matrix within a list of blocks, or elsewhere one with other rows
    than an embedding (a head has as many); never an embedding."""
    modules = [module for _, module in canonical_modules(model)]
    tables = [module for module in modules if isinstance(module, nn.Embedding)]
    embeddings = {id(table.weight) for table in tables}
    rows = {table.num_embeddings for table in tables}
    inside = {id(param) for module in modules if isinstance(module, nn.ModuleList) for param in module.parameters()}
    return lambda param: (
        param.dim() == 2 and id(param) not in embeddings and (id(param) in inside or param.shape[0] not in rows)
    )
