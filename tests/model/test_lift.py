"""Products of experts in float64 are those that torch makes in float32."""

import pytest
import torch
from torch.nn import functional

from shardwise.model.lift import LiftFloat32

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)
FORMS = {
    "rows of the first": ((8, 16), (3, 16, 32), ENDS),
    "rows of the first, some beyond the last group": ((11, 16), (3, 16, 32), ENDS),
    "columns of the second": ((3, 4, 16), (16, 8), ENDS),
    "what is summed over": ((4, 8), (8, 16), ENDS),
    "as many of both": ((3, 4, 16), (3, 16, 32), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_grouped_product(form):
    first, second, ends = FORMS[form]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in (first, second))
    want = functional.grouped_mm(a, b, offs=ends)
    with LiftFloat32():
        found = functional.grouped_mm(a.double(), b.double(), offs=ends)
    rows = 8 if "beyond" in form else None
    assert found.dtype == torch.float64 and found.shape == want.shape
    assert torch.allclose(found[:rows].float(), want[:rows], rtol=1e-4, atol=1e-5)


def test_its_gradients():
    a, b = torch.randn(8, 6, dtype=torch.float64), torch.randn(3, 6, 5, dtype=torch.float64)

    def product(a, b):
        with LiftFloat32():
            return functional.grouped_mm(a, b, offs=ENDS)

    assert torch.autograd.gradcheck(product, (a.requires_grad_(), b.requires_grad_()))
