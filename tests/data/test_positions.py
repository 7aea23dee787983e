"""Which tensors of a batch lose the last position with the tokens: by key and by dim, never by a length that happens to be equal."""

from typing import Any

import pytest
import torch
from data.test_data import fake_world

import shardwise as sw
from shardwise.data.loader import Loader
from shardwise.errors import ConfigError

B, N = 2, 5
SAME = 4  # as many samples as tokens, and as many of anything else


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def shifted(rows: int, num: int, by: Any = sw.shift_labels, **given: Any) -> dict[str, Any]:
    return by({"input_ids": numbered(rows, num), **given})


CUT: dict[tuple[str, str], tuple[int, ...]] = {
    ("attention_mask", "BT"): (-1,),
    ("attention_mask", "B1TT"): (-2, -1),
    ("attention_mask", "BHTT"): (-2, -1),
    ("attention_mask", "BTT"): (-2, -1),
    ("attention_mask", "B11T"): (-1,),
    ("attention_mask", "1T"): (-1,),
    ("causal_mask", "TT"): (-2, -1),
    ("attention_bias", "1HTT"): (-2, -1),
    ("loss_mask", "BT"): (-1,),
    ("special_tokens_mask", "BT"): (-1,),
    ("assistant_masks", "BT"): (-1,),
    ("completion_mask", "BT"): (-1,),
    ("key_padding_mask", "BT"): (-1,),
    ("causal_attn_mask", "BTT"): (-2, -1),
    ("old_per_token_logps", "BT"): (-1,),
    ("ref_logprobs", "BT"): (-1,),
    ("token_embeddings", "BTD"): (1,),
    ("position_ids", "BT"): (-1,),
    ("position_ids", "3BT"): (-1,),
    ("position_ids", "4BT"): (-1,),
    ("position_ids", "1T"): (-1,),
    ("position_ids", "T"): (-1,),
    ("cache_position", "T"): (-1,),
    ("token_type_ids", "BT"): (-1,),
    ("mm_token_type_ids", "BT"): (-1,),
    ("segment_ids", "BT"): (-1,),
    ("seq_idx", "1T"): (-1,),
    ("advantages", "BT"): (-1,),
    ("inputs_embeds", "BTD"): (1,),
    ("inputs_embeds", "BTT"): (1,),
    ("teacher_logits", "BTD"): (1,),
    ("image_attention_mask", "BTD"): (1,),
    ("cross_attention_mask", "BT1D"): (1,),
}
KEPT = {
    ("encoder_hidden_states", "BTD"),
    ("encoder_attention_mask", "BT"),
    ("encoder_position_ids", "BT"),
    ("pixel_values", "BTTT"),
    ("pixel_values", "TD"),
    ("pixel_attention_mask", "BTT"),
    ("pixel_mask", "BTT"),
    ("audio_attention_mask", "BT"),
    ("input_features", "BDT"),
    ("image_grid_thw", "TD"),
    ("image_sizes", "TT"),
    ("features", "BT"),
    ("memory", "BTD"),
    ("weight", "B"),
    ("class_weights", "T"),
    ("group", "B"),
}


@pytest.mark.parametrize("sizes", [(B, N), (SAME, SAME), (1, N), (3, 4)], ids=str)
@pytest.mark.parametrize("by", [sw.shift_labels, sw.make_labels])
def test_tensors_are_cut_where_their_positions_are(sizes, by):
    """Also where there are as many samples as tokens: nothing is taken for what its length happens to equal."""
    rows, num = sizes
    dims = {"B": rows, "T": num, "D": 7, "H": 2, "1": 1, "3": 3, "4": 4}
    for (name, letters), cut in [*CUT.items(), *((key, ()) for key in KEPT)]:
        value = numbered(*(dims[letter] for letter in letters))
        expected = value
        for dim in cut:
            expected = expected.narrow(dim, 0, num - 1)
        found = shifted(rows, num, by, **{name: value})
        assert torch.equal(found[name], expected), (name, letters)
        assert found[name].is_contiguous() and found["input_ids"].shape == found["labels"].shape == (rows, num - 1)


def test_numbers_lists_and_masks_by_kind_of_layer_pass():
    given = {"scale": 3, "names": ["a"] * N, "pair": (1, 2), "none": None, "text": "abcde"}
    assert {name: shifted(B, N, **given)[name] for name in given} == given
    masks = {"full": numbered(B, 1, N, N), "sliding": numbered(B, 1, N, N)}
    found = shifted(B, N, attention_mask=masks)["attention_mask"]
    assert {name: each.shape for name, each in found.items()} == dict.fromkeys(masks, (B, 1, N - 1, N - 1))


UNDECIDED: dict[str, tuple[int, int, str, torch.Tensor]] = {
    "a vector of each sample": (B, N, "scores", numbered(B, N)),
    "something in the last dim": (B, N, "feats", numbered(B, 3, N)),
    "pairs": (B, N, "graph", numbered(B, N, N)),
    "a mask of samples or tokens": (SAME, SAME, "attn_mask", numbered(SAME, SAME)),
    "a causal mask for as many samples": (SAME, SAME, "attention_mask", torch.ones(SAME, SAME).tril()),
    "the same, to be added": (SAME, SAME, "attention_mask", torch.full((SAME, SAME), -9.0).triu(1)),
    "a mask with a past": (B, N, "attention_mask", numbered(B, 1, N, N + 3)),
    "heads without what attends": (B, N, "attention_mask", numbered(B, 3, N)),
    "a mask of one dim": (B, N, "mask", numbered(N)),
    "positions of other rows": (B, N, "position_ids", numbered(7, N)),
    "pictures among the tokens": (B, N, "image_mask", numbered(B, N)),
    "a mask of frames": (B, N, "frame_mask", numbered(B, N)),
    "one of patches, as many as samples too": (SAME, SAME, "patch_mask", numbered(SAME, SAME)),
    "one of nodes and nodes": (B, N, "node_masks", numbered(B, N, N)),
    "one of experts": (B, N, "expert_mask", numbered(B, N)),
    "one of another sequence": (B, N, "chosen_attention_mask", numbered(B, N)),
    "rewards of steps": (B, N, "step_rewards", numbered(B, N)),
    "rewards of several judges": (B, N, "judge_rewards", numbered(B, N)),
    "counts of tokens": (B, N, "token_counts", numbered(B, N)),
    "bounds of packed sequences": (1, 9, "cu_seqlens", torch.tensor([0, 4, 9])),
    "the same, of queries": (1, 9, "cu_seq_lens_q", torch.tensor([0, 9])),
    "lengths": (B, N, "lengths", torch.tensor([3, N])),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_cannot_be_decided_is_refused_by_key_and_the_fix_is_taken(name):
    rows, num, key, value = UNDECIDED[name]
    for by in (sw.shift_labels, sw.make_labels):
        with pytest.raises(ConfigError) as raised:
            shifted(rows, num, by, **{key: value})
        assert raised.value.given.startswith(f"{key!r} of shape {list(value.shape)}")
        prepare = eval(raised.value.fix.partition("prepare=")[2].partition(", with [")[0], {"sw": sw})
        samples = {"input_ids": numbered(rows, num), key: value}
        loader = Loader([0], fake_world(), global_batch=1, micro_batch=1, collate=lambda _: samples, prepare=prepare)  # noqa: B023
        ((batch,),) = loader
        assert torch.equal(batch[key], value) and batch["labels"].shape == (rows, num - 1)


def test_lengths_without_the_last_position_stay():
    assert shifted(B, N, lengths=torch.tensor([3, N - 1]))["lengths"].tolist() == [3, N - 1]
    assert shifted(1, 9, cu_seqlens=torch.tensor([0, 4, 8]))["cu_seqlens"].tolist() == [0, 4, 8]


@pytest.mark.parametrize("length", [N, 3])
def test_labels_of_a_decoder_are_not_shifted(length):
    """Of equal length, too."""
    batch = {"decoder_input_ids": numbered(B, length), "labels": numbered(B, N)}
    for by in (sw.shift_labels, lambda batch: sw.make_labels({k: v for k, v in batch.items() if k != "labels"})):
        with pytest.raises(ConfigError, match="'decoder_input_ids' in a batch") as raised:
            shifted(B, N, by, **batch)
    assert "prepare=None" in raised.value.fix
    given = {"input_ids": numbered(B, N), **batch}
    ((found,),) = Loader([0], fake_world(), global_batch=1, micro_batch=1, collate=lambda _: given, prepare=None)
    assert torch.equal(found["labels"], batch["labels"])


def test_a_model_with_positions_in_three_dims_trains(ranks):
    """Of pictures and texts: position ids [3, B, T], as its processor gives them; the loss is that of the plain model."""
    ours, expected = ranks.run(_three_dims, 1)[0]
    assert abs(ours - expected) < 1e-12


def _three_dims() -> tuple[float, float]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=18,
        video_token_id=17,
        vision_start_token_id=16,
        vision_end_token_id=15,
    )
    torch.manual_seed(0)
    plain = Qwen2VLForConditionalGeneration(config).double()
    ids = torch.randint(0, 15, (2, 9))
    places = (torch.arange(9) * torch.tensor([1, 2, 3])[:, None]).unsqueeze(1).expand(3, 2, 9)
    with sw.init("dp_shard=1", seed=1) as world:
        model = Qwen2VLForConditionalGeneration(config).double()
        model.load_state_dict(plain.state_dict())
        step = sw.TrainStep(model := sw.parallelize(model, world), torch.optim.SGD(model.parameters(), lr=0.1))
        batch = {"input_ids": ids, "labels": ids.clone(), "position_ids": places}
        ours = step([sw.shift_labels(batch)]).loss
    logits = plain(input_ids=ids, position_ids=places).logits[:, :-1]
    return ours, torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
