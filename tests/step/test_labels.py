"""Labels as collators of Hugging Face and TRL give them: a copy of ``input_ids``, not shifted. Trained on them, a model copies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise as sw
from shardwise.data.loader import make_labels
from shardwise.errors import ConfigError

VOCAB = 32


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))


def collated(rank, *, rows=2, length=12, prompt=9):
    """What ``DataCollatorForLanguageModeling(mlm=False)`` and TRL's collators give: the prompt and padding are -100."""
    ids = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rank))
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def own_loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def forward(model, batch):
    return model(batch["input_ids"])


def refused(call):
    try:
        return f"no error: {call()}"
    except ConfigError as error:
        return str(error)


def everywhere(world, model, batch):
    """The ways in which labels are counted."""
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def own_loop():
        with sw.window(model, [batch]) as w:
            for b in w:
                (own_loss(forward(model, b), b) / w.num_tokens).backward()
        optim.zero_grad()
        return int(w.num_tokens)

    return {
        "step": lambda: sw.TrainStep(model, optim, forward=forward)([batch]).num_tokens,
        "own loss": lambda: sw.TrainStep(model, optim, loss=own_loss, forward=forward)([batch]).num_tokens,
        "window": own_loop,
        "count_tokens": lambda: sw.count_tokens(model, [batch]),
        "evaluate": lambda: int(sw.evaluate(model, [batch], forward=forward)["num_tokens"]),
    }


def unshifted(as_loaded):
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build, world)
        batch = collated(world.rank)  # 6 labels of each rank: together enough to tell
        batch = sw.shift_labels(batch) if as_loaded == "shifted" else batch
        found = {name: refused(call) for name, call in everywhere(world, model, batch).items()}
        if as_loaded == "loader":
            samples = [{name: value[0] for name, value in collated(i, rows=1).items()} for i in range(4)]
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), forward=forward)
            for name, options in (("loader", {}), ("loader shifts", {"prepare": sw.shift_labels})):
                (window,) = sw.Loader(samples, world, global_batch=4, micro_batch=1, **options)
                found[name] = refused(lambda w=window: step(w).num_tokens)
        return found


def test_labels_that_were_not_shifted_are_refused_wherever_they_are_counted(ranks):
    for found in ranks.run(unshifted, 2, "loader"):
        assert found.pop("loader shifts") == "no error: 12"
        for name, text in found.items():
            assert text.startswith("labels that equal input_ids at all 12 labelled positions"), (name, text)
            assert "prepare=sw.shift_labels" in text and 'count=lambda batch: (batch["labels"][:, 1:]' in text, name


def test_labels_that_shift_labels_shifted_are_taken(ranks):
    for found in ranks.run(unshifted, 2, "shifted"):
        assert set(found.values()) == {"no error: 12"}, found


# ---- users who mean it -------------------------------------------------------------------------------------------


def masked(batch):
    """A masked language model's batch: 4 of 5 chosen tokens are hidden, one is kept, and all others are -100."""
    ids, labels = batch["input_ids"].clone(), torch.full_like(batch["input_ids"], -100)
    labels[:, ::2] = ids[:, ::2]
    ids[:, [0, 2, 4, 6]] = 0
    return {"input_ids": ids, "labels": labels}


def few(batch):
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, :7] = batch["input_ids"][0, :7]
    return {**batch, "labels": labels}


def copying(batch):
    return {**batch, "labels": batch["input_ids"].clone()}


def with_count(output, batch):
    return own_loss(output, batch)


def all_positions(batch):
    return batch["labels"].numel()


with_count.count = all_positions

MEANT = {
    "masked language model": (masked, {}),
    "the same token in each row": (lambda b: copying({"input_ids": torch.tensor([[3], [5]]).expand(2, 12)}), {}),
    "too few to tell": (few, {}),
    "classes of tokens": (lambda b: {**b, "labels": b["input_ids"] % 3}, {}),
    "to copy, with count=": (copying, {"count": all_positions}),
    "to copy, with loss.count": (copying, {"loss": with_count}),
    "numbers for tokens": (
        lambda b: {**b, "labels": b["input_ids"].float()},
        {"loss": lambda output, batch: (output[..., 0] - batch["labels"]).square().sum()},
    ),
}


def second_run():
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(build, world)
        texts = []
        for batch in (sw.shift_labels(collated(0, prompt=2)), collated(1, prompt=2)):
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), forward=forward)
            texts.append(refused(lambda s=step, b=batch: s([b]).num_tokens))
        return texts


def test_a_second_step_on_the_same_model_compares_anew(ranks):
    first, second = ranks.run(second_run, 1)[0]
    assert first == "no error: 20" and second.startswith("labels that equal input_ids at all 20")


def meant():
    with sw.init("dp_shard=1", device="cpu") as world:
        found = {}
        for name, (change, options) in MEANT.items():
            model = sw.parallelize(build, world)  # each is a run of its own, from its first window on
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), forward=forward, **options)
            batch = change(collated(0))

            def both(model=model, step=step, batch=batch, options=options):
                return step([batch]).num_tokens == sw.evaluate(model, [batch], forward=forward, **options)["num_tokens"]

            found[name] = refused(both)
        return found


def test_labels_that_are_meant_so_are_taken(ranks):
    found = ranks.run(meant, 1)[0]
    assert set(found.values()) == {"no error: True"}, found


# ---- the loss of transformers ------------------------------------------------------------------------------------


def targets(batch):
    """Labels that are counted by a model that shifts them itself."""
    return (batch["labels"][:, 1:] != -100).sum()


def hugging_face(kind):
    """(our loss by a collator's batch, transformers' own, ours by a model that shifts inside) of a window with a prompt and padding."""
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    else:
        config = transformers.LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        )
    plain = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    words = Tokenizer(models.WordLevel({"[PAD]": 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": torch.randint(1, VOCAB, (n,), generator=generator).tolist()} for n in (12, 7, 9)]
    batch = dict(collate(rows))
    with torch.no_grad():
        expected = plain(**batch).loss.item()
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(plain, world)
        optim = torch.optim.SGD(model.parameters(), lr=0.0)
        ours = sw.TrainStep(model, optim)([sw.shift_labels(batch)]).loss
        inside = sw.TrainStep(
            model,
            optim,
            forward=lambda model, batch: model(**batch),
            loss=lambda output, batch: output.loss * targets(batch),
            count=targets,
        )
        return ours, expected, inside([batch]).loss


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_loss_of_a_collators_batch_is_that_of_transformers(ranks, kind):
    ours, expected, inside = ranks.run(hugging_face, 1, kind)[0]
    assert abs(ours - expected) < 1e-6 * expected and abs(inside - expected) < 1e-6 * expected


def copied(key: str, other: str = ""):
    """What is said of labels that are a copy of tokens with another name."""
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build, world)
        tokens = collated(world.rank)["input_ids"]
        batch = {key: tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens)}
        batch |= {other: tokens.flip(0)} if other else {}
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), forward=lambda m, b: m(b[key]))
        return refused(lambda: step([batch]).num_tokens)


@pytest.mark.parametrize("key", ["idx", "tokens", "x"])
def test_copied_labels_are_found_under_other_names_of_their_tokens(ranks, key):
    for text in ranks.run(copied, 2, key):
        assert "labels that equal input_ids at all 48 labelled positions" in text
    # With a second tensor that they could follow, nothing says which.
    assert [text[:8] for text in ranks.run(copied, 2, key, "types")] == ["no error"] * 2


@pytest.mark.parametrize(
    "given", [{"idx": torch.zeros(2, 5).long()}, {"input_ids": [[1, 2]]}, torch.zeros(2, 5), [1, 2], {}]
)
def test_shift_labels_without_tokens_is_refused(given):
    with pytest.raises(ConfigError, match="without a tensor input_ids"):
        sw.shift_labels(given)


# ---- shift_labels ------------------------------------------------------------------------------------------------


def test_shift_labels_shifts_labels_that_are_given_and_make_labels_does_not():
    batch = collated(0, rows=1, length=5, prompt=2)
    ids = batch["input_ids"][0].tolist()
    out = sw.shift_labels({**batch, "attention_mask": torch.tensor([[1, 1, 1, 1, 0]]), "weight": torch.ones(1)})
    assert out["input_ids"].tolist() == [ids[:4]] and out["labels"].tolist() == [[-100, ids[2], ids[3], -100]]
    assert out["attention_mask"].shape == (1, 4) and out["weight"].shape == (1,)
    assert all(torch.equal(batch[name], value) for name, value in make_labels(batch).items())
    # Of a Loader with prepare=None:
    padding = sw.shift_labels(sw.MicroBatch(batch, index=3, padding=True, window=(0, 4)))
    assert (padding.index, padding.padding, padding.window) == (3, True, (0, 4))


@pytest.mark.parametrize("given", [{}, {"labels": "copy"}])
def test_shift_labels_twice_is_refused(given):
    batch = collated(0)
    once = sw.shift_labels(batch if given else {"input_ids": batch["input_ids"]})
    with pytest.raises(ConfigError, match="labels that are shifted already"):
        sw.shift_labels(once)
    with pytest.raises(ConfigError, match=r"shift_labels of labels of shape \[2\]"):
        sw.shift_labels({**batch, "labels": torch.zeros(2)})


def test_shift_labels_takes_every_batch_of_a_collator():
    """None is refused for what it happens to hold: one token all along, no label at all, noise in the inputs."""
    for change in (
        lambda b: {"input_ids": torch.full((2, 12), 5), "labels": torch.full((2, 12), 5)},
        lambda b: {**b, "labels": torch.full((2, 12), -100)},
        lambda b: {**b, "input_ids": torch.where(torch.arange(12) % 3 == 0, 0, b["input_ids"])},
        few,
    ):
        batch = change(collated(0))
        assert torch.equal(sw.shift_labels(batch)["labels"], batch["labels"][:, 1:])
