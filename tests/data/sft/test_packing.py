"""Documents that share a sample: the same sums as when each is padded, and no attention between them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import chat
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import _is_packed_sequence
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import shardwise as sw
from shardwise.data.sft.packing import packs
from shardwise.errors import ConfigError

SEQ_LEN = 48
LAYOUTS = {
    "dp_shard=1": 1,
    "dp_replicate=2": 2,
    "dp_shard=2": 2,
    "dp_replicate=2,dp_shard=2": 4,
    "tp=2": 2,
}


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 64))
def test_each_document_is_in_one_sample_and_none_is_too_large(lengths, size):
    found = packs(lengths, size)
    assert sorted(i for sample in found for i in sample) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in sample) for sample in found]
    assert all(total <= size for total in totals)
    assert all(one + other > size for i, one in enumerate(totals) for other in totals[:i])  # no two fit together


def records(path: Path) -> Path:
    """Conversations of one to three turns, of unequal length."""
    words = ["Hello there", "I am fine", "good bye", "what is the sum of two and three ?", "five"]
    lines = []
    for i in range(16):
        turns = [
            message
            for j in range(1 + i % 2)
            for message in (
                {"role": "user", "content": words[(i + j) % 5]},
                {"role": "assistant", "content": words[(2 * i + j) % 5]},
            )
        ]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))
    return path


def built(vocab: int) -> nn.Module:
    torch.manual_seed(1)
    return chat.model(vocab).double()


def one_process(path: Path) -> tuple[float, float, list[Tensor]]:
    """Loss, gradient norm and gradients of all records, each by itself: nothing is padded or packed."""
    tokenizer = chat.tokenizer()
    data, model = sw.SFTDataset(path, tokenizer, seq_len=SEQ_LEN), built(len(tokenizer))
    assert data.report.truncated and len(data) == 16
    losses = []
    for i in range(len(data)):
        sample = {key: value[None] for key, value in data[i].items()}
        losses.append(sw.next_token_loss(model(sample["input_ids"]), sample) / data.report.trained)
    sum(losses).backward()
    grads = [param.grad for param in model.parameters()]
    return float(sum(losses).detach()), float(torch.stack([grad.norm() for grad in grads]).norm()), grads


def trained(layout: str, path: Path, pack: bool, size: dict[str, int]) -> tuple[float, float, float, list[Tensor]]:
    """Loss, norm, tokens of a step on all samples, and the gradients, from the change of the parameters."""
    tokenizer = chat.tokenizer()
    with sw.init(layout, device="cpu", timeout_s=60) as world:
        data = sw.SFTDataset(path, tokenizer, seq_len=SEQ_LEN, pack=pack)
        plain = built(len(tokenizer))
        before = [param.detach().clone() for param in plain.parameters()]
        names = [name for name, _ in plain.named_parameters()]
        example = data.collate([data[0], data[1]]) if "tp" in layout else None
        model = sw.parallelize(plain, world, example=example)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=1.0))
        num = -(-len(data) // 2) * 2
        loader = sw.Loader(data, world, global_batch=num, **size, collate=data.collate, shuffle=False)
        (window,) = list(loader)
        out = step(window)
        assert out.num_tokens == data.report.trained
        assert (len(data) < 16) == pack
        whole = sw.full_state_dict(model)
        grads = [old - whole[name] for name, old in zip(names, before, strict=True) if whole]
        return out.loss, out.grad_norm, out.num_tokens, grads


@pytest.mark.quick(
    "dp_replicate=2-packed-'micro_batch': 2", "tp=2-padded-'micro_batch': 2", "dp_shard=2-padded-'micro_tokens': 110"
)
@pytest.mark.parametrize(
    ("layout", "pack", "size"),
    [
        *((layout, pack, {"micro_batch": 2}) for layout in LAYOUTS for pack in (False, True)),
        *((layout, False, {"micro_tokens": 110}) for layout in ("dp_shard=1", "dp_replicate=2", "dp_shard=2")),
    ],
    ids=lambda value: {False: "padded", True: "packed"}[value] if isinstance(value, bool) else str(value).strip("{}"),
)
def test_padded_and_packed_give_the_sums_of_single_records(ranks, tmp_path, layout, pack, size):
    path = records(tmp_path / "chat.jsonl")
    loss, norm, grads = one_process(path)
    for found_loss, found_norm, _, found in ranks.run(trained, LAYOUTS[layout], layout, path, pack, size):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert found_norm == pytest.approx(norm, rel=1e-10)
        for ours, plain in zip(found, grads, strict=bool(found)):
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)


def test_positions_begin_anew_with_each_document(tmp_path):
    tokenizer = chat.tokenizer()
    data = sw.SFTDataset(records(tmp_path / "chat.jsonl"), tokenizer, seq_len=SEQ_LEN, pack=True)
    num = 0
    for i in range(len(data)):
        sample = data[i]
        assert {len(value) for value in sample.values()} == {SEQ_LEN}
        for at, document in enumerate(data.packs[i]):
            ids, labels = data.documents[document]
            start = sum(len(data.documents[other][0]) for other in data.packs[i][:at])
            part = {key: value[start : start + len(ids)].tolist() for key, value in sample.items()}
            assert part == {"input_ids": ids.tolist(), "labels": labels.tolist(), "position_ids": [*range(len(ids))]}
            num += 1
    assert num == 16


class Crosses(nn.Module):
    """A model that takes position_ids, and whose positions see all before them."""

    def __init__(self, vocab: int = 400):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 8), nn.Linear(8, vocab)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids).cumsum(1) / (position_ids[..., None] + 1))


def finds_documents(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, position_ids: Tensor, **__: Any
) -> Any:
    """Attention that finds documents as the flash kernels of transformers do, by the same function."""
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()[None]
    if _is_packed_sequence(position_ids, q.shape[0]):
        document = (position_ids == 0).cumsum(-1)
        mask = mask & (document[:, :, None] == document[:, None, :])
    out = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
    return out.transpose(1, 2).contiguous(), None


def test_flash_attention_is_right_for_one_sample_only_and_that_is_what_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "finds_documents", finds_documents)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "finds_documents", lambda *_, **__: None)
    data = sw.SFTDataset(records(tmp_path / "chat.jsonl"), chat.tokenizer(), seq_len=SEQ_LEN, pack=True)
    model = chat.model(attn_implementation="finds_documents")
    data.check_attention(model, micro_batch=1)
    with pytest.raises(ConfigError, match=r"(?s)2 in a micro-batch.*micro_batch=1"):
        data.check_attention(model)
    data.check_attention(chat.model(attn_implementation="eager"), micro_batch=3)


def said(build: Any, path: Path, forward: Any) -> str:
    data = sw.SFTDataset(path, chat.tokenizer(), seq_len=SEQ_LEN, pack=True)
    with sw.init("dp_shard=2", device="cpu") as world:
        model = sw.parallelize(build(), world)
        try:
            data.check_attention(model, **({} if forward is None else {"forward": forward}))
        except ConfigError as error:
            return str(error)
    return ""


def with_cache(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


@pytest.mark.parametrize(
    ("build", "forward", "is_right"),
    [(chat.model, None, True), (chat.gpt2, None, True), (chat.model, with_cache, False), (Crosses, None, False)],
    ids=["llama", "gpt2", "llama with a cache", "own"],
)
def test_attention_that_goes_from_document_to_document_is_refused(ranks, tmp_path, build, forward, is_right):
    """A Llama called as usual makes a cache, and then takes no notice of where documents begin."""
    for told in ranks.run(said, 2, build, records(tmp_path / "chat.jsonl"), forward):
        assert told == "" if is_right else "its attention goes from one document" in told
