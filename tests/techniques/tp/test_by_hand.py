"""Layers that are cut over ranks by hand: outputs and gradients are those of one process."""

import pytest
import torch
from techniques.tp import by_hand


@pytest.mark.parametrize("keeps_whole", [False, True])
def test_layers(ranks, keeps_whole):
    outputs, gradients = by_hand.plain()
    for mine, its in ranks.run(by_hand.cut, 2, keeps_whole):
        assert float((mine - outputs).abs().max()) < 1e-12
        assert its.keys() == gradients.keys()
        for name, grad in gradients.items():
            assert float((its[name] - grad).abs().max()) < 1e-12 * float(grad.abs().max()), name


def test_a_row_parallel_layer_that_gets_all_inputs(ranks):
    for differences in ranks.run(by_hand.row_parallel_of_a_whole_input, 2):
        assert max(differences) < 1e-13


def test_a_loss_of_a_model_that_is_cut(ranks):
    loss, params = ranks.run(by_hand.loss_of_a_plain_step, 1)[0]
    mine, its = ranks.run(by_hand.loss_of_a_step, 2)[0]
    assert mine == pytest.approx(loss, rel=1e-5)
    assert all(torch.allclose(its[name], param, rtol=1e-4, atol=1e-6) for name, param in params.items())


def test_refused_by_name(ranks):
    for found in ranks.run(by_hand.refused, 2):
        assert "the 2 ranks along tp do not divide 5" in found["uneven"]
        assert (
            "UnsupportedError: tp_reduce within a model that is given to parallelize with tp=2"
            in found["within parallelize"]
        )
