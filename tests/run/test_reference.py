"""The reference model: shapes, sizes, causality, dtypes, meta construction; and completions."""

import copy
import inspect

import pytest
import torch

from shardwise.data.sft.packing import check_attention
from shardwise.errors import ConfigError
from shardwise.run import reference
from shardwise.run.reference import ReferenceConfig, ReferenceModel
from shardwise.run.sample import complete_text, generate

SMALL = ReferenceConfig(vocab=61, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn=48, max_seq=16)


@pytest.fixture
def model() -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(SMALL)


def test_demo_size_and_length_of_the_file():
    assert sum(p.numel() for p in ReferenceModel().parameters()) == 803_968
    assert len(inspect.getsource(reference).splitlines()) < 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_keep_the_dtype_of_the_weights(model, dtype):
    logits = model.to(dtype)(torch.zeros(2, 5, dtype=torch.long))
    assert logits.shape == (2, 5, 61) and logits.dtype == dtype


def test_logits_start_near_uniform(model):
    logits = model(torch.arange(16)[None] % 61)
    loss = torch.nn.functional.cross_entropy(logits[0], torch.arange(16))
    assert abs(loss.item() - torch.log(torch.tensor(61.0)).item()) < 0.3


def test_a_position_sees_only_the_past(model):
    ids = torch.randint(0, 61, (1, 12))
    other = ids.clone()
    other[0, 7] = (other[0, 7] + 1) % 61
    a, b = model(ids), model(other)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.allclose(a[:, 7:], b[:, 7:])


def test_attention_depends_on_distances_not_on_places(model):
    rotary = model.blocks[0].attention.rotary
    q, k = torch.randn(8), torch.randn(8)
    at = rotary(torch.stack([q.expand(16, 8), k.expand(16, 8)])[None])[0]
    scores = at[0] @ at[1].T
    assert torch.allclose(scores[5, 2], scores[13, 10], atol=1e-5)
    assert not torch.allclose(scores[5, 2], scores[5, 3], atol=1e-3)


def test_buffers_stay_fp32_and_out_of_the_state_dict(model):
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    assert not any("rotary" in name for name in model.state_dict())


def test_built_on_meta_and_reset_every_value_is_written():
    with torch.device("meta"):
        model = ReferenceModel(SMALL)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(t.isfinite().all() for t in (*model.parameters(), *model.buffers()))
    direct = dict(ReferenceModel(SMALL).named_buffers())
    assert all(torch.equal(b, direct[name]) for name, b in model.named_buffers())


def test_resets_are_the_whole_initialisation():
    """Replayed from the same random state, the resets give what the constructor gave."""
    torch.manual_seed(3)
    built = ReferenceModel(SMALL)
    replayed = copy.deepcopy(built)
    torch.manual_seed(3)
    # In the order of construction, which for this model is the order of modules.
    for module in replayed.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), replayed.parameters(), strict=True))


def test_tied_embeddings_share_one_parameter():
    config = ReferenceConfig(**{**SMALL.__dict__, "tie_embeddings": True})
    model = ReferenceModel(config)
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len(list(ReferenceModel(SMALL).parameters())) - 1


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"dim": 30, "num_heads": 4}, "dim=30 with num_heads=4"),
        ({"dim": 12, "num_heads": 4}, "an even number"),
        ({"num_heads": 4, "num_kv_heads": 3}, "use num_kv_heads=1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, text):
    with pytest.raises(ConfigError, match=text):
        reference.build(**sizes)


def test_generate_greedy_takes_the_most_likely(model):
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    out = generate(model, prompt, 4, context=16)
    assert out.shape == (2, 7) and torch.equal(out[:, :3], prompt)
    for t in range(3, 7):
        assert torch.equal(out[:, t], model(out[:, :t])[:, -1].argmax(-1))


class PartlyInEvalMode(torch.nn.Sequential):
    """A part is kept in eval mode on purpose, as docs/training.md advises for frozen norms."""

    def __init__(self):
        super().__init__(torch.nn.Embedding(8, 4), torch.nn.Dropout(0.9).eval(), torch.nn.Linear(4, 8))

    def forward(self, input_ids, **_):
        assert not self.training
        return super().forward(input_ids)


@pytest.mark.parametrize(
    "look",
    [
        lambda model: generate(model, torch.tensor([[1, 2]]), 2, context=4),
        lambda model: check_attention(model, lambda inner, batch: inner(**batch), 2),
    ],
    ids=["generate", "check_attention"],
)
def test_a_part_that_is_in_eval_mode_stays_so(look):
    model = PartlyInEvalMode()
    look(model)
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_generate_draws_the_same_on_every_rank_and_leaves_the_training_alone(model):
    prompt = torch.tensor([[1, 2, 3]])
    state = torch.get_rng_state()
    a = generate(model, prompt, 12, context=16, temperature=1.0, seed=5)
    torch.manual_seed(99)
    torch.rand(7)
    b = generate(model, prompt, 12, context=16, temperature=1.0, seed=5)
    assert torch.equal(a, b)
    assert not torch.equal(a, generate(model, prompt, 12, context=16, temperature=1.0, seed=6))
    torch.set_rng_state(state)
    generate(model, prompt, 3, context=16, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_generate_cuts_to_the_context_restores_the_mode_and_calls_the_module(model):
    lengths, made = [], []
    model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    model.train()
    out = generate(model, torch.tensor([[1, 2, 3]]), 5, context=5, on_token=made.append)
    assert lengths == [3, 4, 5, 5, 5] and torch.equal(torch.cat(made, 1), out[:, 3:])
    assert model.training
    model.eval()
    generate(model, torch.tensor([[1]]), 1, context=5)
    assert not model.training


def _generate_between_updates() -> list[list[int]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = ReferenceModel(SMALL)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    shards, found = list(model.parameters()), []  # what an optimizer holds
    for _ in range(2):
        found.append(generate(model, torch.tensor([[1, 2, 3]]), 3, context=8)[0].tolist())
        with torch.no_grad():
            for param in shards:
                param.neg_()
    return found


def test_generate_on_shards_sees_each_update(ranks):
    """The same as one process: gathered values must not outlive the call."""
    torch.manual_seed(0)
    model = ReferenceModel(SMALL)
    expected = []
    for _ in range(2):
        expected.append(generate(model, torch.tensor([[1, 2, 3]]), 3, context=8)[0].tolist())
        with torch.no_grad():
            for param in model.parameters():
                param.neg_()
    assert expected[0] != expected[1]
    assert ranks.run(_generate_between_updates, 2) == [expected] * 2


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {"context": 4}),
        (torch.zeros(3, dtype=torch.long), {"context": 4}),
        (torch.zeros(1, 3, dtype=torch.long), {"context": 0}),
        (torch.zeros(1, 3, dtype=torch.long), {"context": 4, "temperature": -1.0}),
    ],
)
def test_generate_refuses_what_it_cannot_continue(model, prompt, options):
    with pytest.raises(ConfigError, match="at least one token as prompt"):
        generate(model, prompt, 2, **options)


def test_complete_text_returns_the_continuation_alone():
    def model(ids):  # the next byte is the one that follows in the alphabet
        return torch.nn.functional.one_hot(ids + 1, 300).float()

    wrapped = torch.nn.Module()
    wrapped.forward = model
    assert complete_text(wrapped, "ab", 3, device=torch.device("cpu"), context=8) == "cde"
    wrapped.forward = lambda ids: torch.nn.functional.one_hot(ids * 0 + 299, 300).float()
    assert complete_text(wrapped, "ab", 1, device=torch.device("cpu"), context=8) == "\ufffd"
