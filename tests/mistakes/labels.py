"""Labels that mean something else than was thought, and tokens that are none."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mistakes.rows import Mistake, Plain, command, off
from mistakes.toys import (
    DDP,
    batch,
    build,
    corpus,
    gradients,
    language_model,
    mean_loss,
    plain_backward,
    sharded,
    sum_loss,
)
from run.test_tokens import WORDS, tokenizer_in

import shardwise as sw


def collated() -> dict[str, torch.Tensor]:
    """As ``DataCollatorForLanguageModeling(mlm=False)`` gives them."""
    ids = corpus()
    return {"input_ids": ids, "labels": ids.clone()}


class LabelsNotShifted(Mistake):
    """Labels are a copy of the inputs (collators of Hugging Face and TRL), and the loss does not shift them."""

    says = "labels that equal input_ids"

    def plain(self):
        model, batch = language_model(), collated()
        optim = torch.optim.AdamW(model.parameters(), lr=0.03)
        for _ in range(150):
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
        with torch.no_grad():
            truth = F.cross_entropy(model(batch["input_ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten())
        return Plain(f"reports a loss of {loss:.3f}; that of the next token is {truth:.1f}", off(loss, truth))

    def ours(self):
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(language_model, world)
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
            step([collated()])
        return float("inf")


class LabelsShiftedTwice(Mistake):
    """Labels that the data set has shifted already are shifted once more by the loop."""

    says = "shifted already"

    def plain(self):
        model, ids = language_model(), corpus()
        inputs, labels = ids[:, :-1], ids[:, 1:]  # aligned
        optim = torch.optim.AdamW(model.parameters(), lr=0.03)
        for _ in range(150):
            loss = F.cross_entropy(model(inputs)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()
            optim.step()
            optim.zero_grad()
        with torch.no_grad():
            truth = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        return Plain(f"reports a loss of {loss:.1f}; that of the next token is {truth:.1f}", off(loss, truth))

    def ours(self):
        ids = corpus()
        batch = sw.shift_labels({"input_ids": ids[:, :-1], "labels": ids[:, 1:]})
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(language_model, world)
            sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))([batch])
        return float("inf")


class ModelShiftsToo(Mistake):
    """A model of transformers is given labels that are shifted already, and shifts them itself."""

    def plain(self):
        model, ids = llama(), corpus()
        optim = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(60):
            loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss
            loss.backward()
            optim.step()
            optim.zero_grad()
        truth = model(input_ids=ids, labels=ids).loss
        return Plain(f"reports a loss of {loss:.1f}; that of the next token is {truth:.1f}", off(loss, truth))

    def ours(self):
        ids = corpus()
        samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
        wanted = F.cross_entropy(llama()(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(llama(), world)
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
            (window,) = sw.Loader(samples, world, global_batch=8, micro_batch=4)
            return off(step(window).loss, wanted)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).double()


class PaddingTrained(Mistake):
    """Padding of the collator is left in the labels: `attention_mask` says what it is, the loss does not look at it."""

    def plain(self):
        model, given = language_model(), padded()
        logits = model(given["input_ids"][:, :-1])
        labels, mask = given["input_ids"][:, 1:], given["attention_mask"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        truth = F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(mask == 0, -100).flatten())
        share = float((mask == 0).double().mean())
        grads = [torch.autograd.grad(each, model[1].weight, retain_graph=True)[0] for each in (loss, truth)]
        return Plain(
            f"{share:.0%} of what is learnt is padding; gradients {off(*grads):.1f} times their size off", off(*grads)
        )

    def ours(self):
        given = padded()
        samples = [{name: value[i] for name, value in given.items()} for i in range(len(given["input_ids"]))]
        plain = language_model().double()
        labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)[:, 1:]
        wanted = F.cross_entropy(plain(given["input_ids"][:, :-1]).flatten(0, 1), labels.flatten())
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(language_model().double(), world)
            step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), forward=by_ids)
            (window,) = sw.Loader(samples, world, global_batch=8, micro_batch=4)
            return off(step(window).loss, wanted)


def by_ids(model, given):
    return model(given["input_ids"])


def padded():
    ids = corpus()
    mask = torch.arange(ids.shape[1]) < torch.arange(4, 12)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


class NothingToCountOnARank(Mistake):
    """All labels of one rank are ignored: a mean over no tokens, averaged with the other's."""

    ranks = 2

    def plain(self):
        model, given = DDP(build()), batch(0, valid=0 if dist.get_rank() else 8)
        loss = mean_loss(model(given["input_ids"]), given).detach()
        mean_loss(model(given["input_ids"]), given).backward()
        dist.all_reduce(loss)
        wrong = off({name: p.grad for name, p in model.module.named_parameters()}, self.wanted())
        return Plain(f"the mean loss is {loss:.0f}, and gradients are {wrong:.2f} off", wrong)

    def ours(self):
        with sw.init("dp_shard=2", device="cpu") as world:
            model = sharded(world)
            with sw.window(model, [batch(0, valid=0 if world.rank else 8)]) as w:
                for given in w:
                    (sum_loss(model(given["input_ids"]), given) / w.num_tokens).backward()
            return off(gradients(model), self.wanted())

    def wanted(self):
        plain = build()
        plain_backward(plain, [batch(0, valid=8), batch(0, valid=0)])
        return {name: p.grad for name, p in plain.named_parameters()}


TEXT = "\n".join(" ".join(WORDS[(i * j) % 8] for j in range(1, 9)) for i in range(1, 60)) + "\n"


class ShiftedOnceMoreByTheModel(Mistake):
    """Labels that are the next tokens already are given to a causal language model of transformers, whose own loss shifts them once more."""

    says = "labels that are shifted already, given to"

    @staticmethod
    def build():
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))

    def plain(self):
        model, ids = (
            self.build(),
            (torch.arange(16).view(1, 16) + torch.arange(32).view(32, 1)) % 32,
        )  # each token is one more than the last
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(60):
            model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss.backward()
            optim.step()
            optim.zero_grad()
        model.eval()
        found = model(input_ids=ids).logits[0, -1].argmax() - ids[0, -1]
        return Plain(f"counts in steps of {int(found) % 32}", float(int(found) % 32 != 1))

    def ours(self):
        samples = [(torch.arange(17) + i) % 32 for i in range(8)]
        with sw.init("dp_shard=1", device="cpu") as world:
            model = sw.parallelize(self.build(), world)
            step = sw.TrainStep(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                forward=lambda model, given: model(**given),
                loss=lambda out, given: out.loss * (given["labels"] != -100).sum(),
            )
            for window in sw.Loader(samples, world, global_batch=4, micro_batch=2):
                step(window)
        return float("inf")


class BytesForTokens(Mistake):
    """A text is fed as bytes to a model that has a tokenizer."""

    says = "which has a tokenizer"

    def plain(self):
        model = language_model(300)
        optim = torch.optim.AdamW(model.parameters(), lr=0.03)
        read = torch.tensor(list(TEXT.encode()))
        tokens = torch.tensor([1 + WORDS.index(word) for word in TEXT.split()])

        def loss_of(ids):
            return F.cross_entropy(model(ids[:-1]), ids[1:])

        before = loss_of(tokens).item()
        for _ in range(60):
            loss_of(read).backward()
            optim.step()
            optim.zero_grad()
        after = loss_of(tokens).item()
        return Plain(
            f"reports {loss_of(read).item():.1f} after 60 steps; the loss of its tokens went from {before:.1f} to {after:.1f}",
            after / before - 1,
        )

    def ours(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        GPT2LMHeadModel(GPT2Config(vocab_size=9, **sizes)).save_pretrained("words")
        tokenizer_in(Path("words"))
        Path("text.txt").write_text(TEXT)
        return command("train", "--model.hf=words", "--data.path=text.txt", "--log.dir=run", "--launch.device=cpu")


RECORDS = '{"id": 17, "source": "web", "text": "a sentence of the text that is meant"}\n' * 20


class FileOfRecords(Mistake):
    """The file of the training text is JSON lines: braces, keys and escapes are learnt."""

    says = "it is JSON"

    def plain(self):
        Path("text.txt").write_text(RECORDS)
        text = sum(len(json.loads(line)["text"]) for line in Path("text.txt").read_text().splitlines())
        share = 1 - text / len(Path("text.txt").read_bytes())
        return Plain(f"{share:.0%} of the bytes that are trained are no text", share)

    def ours(self):
        Path("text.txt").write_text(RECORDS)
        return command("train", "--data.path=text.txt", "--log.dir=run", "--launch.device=cpu")
