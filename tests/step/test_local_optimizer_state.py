"""The state a local optimizer shows: DTensors over its own memory, made once."""

import torch
from torch.distributed.tensor import DTensor

import shardwise as sw


def _three_steps():
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(torch.nn.Linear(4, 6), world, sharding=sw.Sharding(engine="fsdp2"))
        optim = sw.local_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        seen = []
        for _ in range(3):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optim.step()
            shown = optim.state[model.weight]
            assert isinstance(shown["exp_avg"], DTensor)
            seen.append(
                (id(shown), id(shown["exp_avg"]), float(shown["exp_avg"].to_local().max()), float(shown["step"]))
            )
        return seen


def test_the_state_shown_is_made_once_and_follows_every_step(ranks):
    # Made anew at every step, it took an eighth of the step of a model with many small parameters.
    for seen in ranks.run(_three_steps, 2):
        assert len({(state, tensor) for state, tensor, _, _ in seen}) == 1
        assert [round(average, 6) for _, _, average, _ in seen] == [0.1, 0.19, 0.271]
        assert [step for *_, step in seen] == [1, 2, 3]
