"""Training loops that people write: what one micro-batch does with a model, a batch ``x`` and a divisor ``n``."""

import torch
from models.towers import TwoTowers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Fails(torch.autograd.Function):
    """A step of a model that fails in backward."""

    @staticmethod
    def forward(_ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad: Tensor) -> Tensor:  # type: ignore[override]
        raise MemoryError("as on a device")


def two_forwards_two_backwards(model: nn.Module, x: Tensor, n: float) -> None:
    first, second = model(x).sum(), model(x * 0.5).pow(2).sum()
    (first / n).backward()
    (second / n).backward()


def forward_backward_twice(model: nn.Module, x: Tensor, n: float) -> None:
    (model(x).sum() / n).backward()
    (model(x * 0.5).pow(2).sum() / n).backward()


def one_forward_two_backwards(model: nn.Module, x: Tensor, n: float) -> None:
    y = model(x)
    (y.sum() / n).backward(retain_graph=True)
    (y.pow(2).sum() / n).backward()


def a_forward_that_is_not_used(model: nn.Module, x: Tensor, n: float) -> None:
    model(x)
    (model(x * 0.5).sum() / n).backward()


def encoders_by_themselves(model: TwoTowers, x: Tensor, n: float) -> None:
    ((model.image(x) * model.text(x) * model.temperature.exp()).sum() / n).backward()


def a_loss_from_an_attribute(model: TwoTowers, x: Tensor, n: float) -> None:
    model(x)
    (model.aux / n).backward()


def a_gradient_penalty(model: nn.Module, x: Tensor, n: float) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    ((slope.norm() - 1).pow(2) / n).backward()


def gradients_by_hand(model: nn.Module, x: Tensor, n: float) -> None:
    params = list(model.text.parameters())
    for param, grad in zip(params, torch.autograd.grad(model(x).sum() / n, params), strict=True):
        param.grad = grad if param.grad is None else param.grad + grad


def reentrant_checkpoints(model: nn.Module, x: Tensor, n: float) -> None:
    y = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
    (checkpoint(model, y, use_reentrant=True).sum() / n).backward()


LOOPS = {
    loop.__name__: loop
    for loop in (
        two_forwards_two_backwards,
        forward_backward_twice,
        one_forward_two_backwards,
        a_forward_that_is_not_used,
        encoders_by_themselves,
        a_loss_from_an_attribute,
        a_gradient_penalty,
        gradients_by_hand,
        reentrant_checkpoints,
    )
}
