"""What makes sense on one CUDA device: a world of 1 over nccl, moves to the device, parity, bf16, memory.

Run by `make gpu`, which also trains the demo there. The models are our own, so nothing is downloaded.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.run.build import build_model
from shardwise.run.config import load_config
from shardwise.run.datasets import open_data, vocab_of
from shardwise.run.optim import make_optimizer, make_scheduler
from shardwise.run.reference import ReferenceConfig, ReferenceModel

# Warnings of the driver and of nccl differ from machine to machine; elsewhere in the suite a warning is a failure.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

SMALL = ReferenceConfig(dim=64, num_layers=3, ffn=128)


@pytest.fixture
def world(device):
    with sw.init("dp_shard=1") as world:
        yield world


class Dropping(nn.Module):
    """A model whose loss depends on random numbers drawn on the device."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.head = nn.Linear(32, 64)
        self.register_buffer("scale", torch.ones(32))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.embed(input_ids) * self.scale, 0.5, training=self.training))


def windows(num: int, vocab: int = 64, length: int = 32, micro: int = 2, device: str | torch.device = "cuda"):
    """Windows of micro-batches with unequal numbers of valid tokens."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(num):
        window = []
        for i in range(micro):
            ids = torch.randint(vocab, (4, length + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[:, length - 3 * i - 1 :] = -100
            window.append({"input_ids": ids[:, :-1].contiguous().to(device), "labels": labels.to(device)})
        made.append(window)
    return made


def small(**changes) -> ReferenceModel:
    return ReferenceModel(SMALL) if not changes else ReferenceModel(ReferenceConfig(**changes))


# ---- the world -----------------------------------------------------------------------------------------------------


def test_a_world_of_one_has_a_backend_for_each_device(world, device):
    assert world.device == device
    backends = dist.get_backend_config()
    assert "cuda:nccl" in backends and "cpu:gloo" in backends
    for where in (device, torch.device("cpu")):
        tensor = torch.arange(3.0, device=where)
        dist.all_reduce(tensor)
        assert tensor.device == where and tensor.tolist() == [0.0, 1.0, 2.0]
    assert world.mesh.device_type == "cuda"
    world.barrier()
    assert world.gather({"rank": world.rank}) == [{"rank": 0}]


def test_worlds_can_be_opened_one_after_another(device):
    for _ in range(2):
        with sw.init("dp_shard=1") as world:
            assert world.device == device
        assert not dist.is_initialized()


def test_the_cpu_can_be_asked_for_where_there_is_a_device(device):
    with sw.init("dp_shard=1", device="cpu") as world:
        model = sw.parallelize(small, world)
        assert {p.device.type for p in model.parameters()} == {"cpu"}


# ---- moves ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("given", ["callable", "module on the CPU", "module on the device"])
def test_everything_is_on_the_device_and_state_comes_back_to_the_host(world, device, engine, given):
    module = Dropping if given == "callable" else Dropping()
    if given == "module on the device":
        module = module.to(device)
    before = (
        None if given == "callable" else {name: t.detach().cpu().clone() for name, t in module.state_dict().items()}
    )
    model = sw.parallelize(module, world, sharding=sw.Sharding(engine=engine))
    tensors = [*model.parameters(), *model.buffers()]
    assert {t.device for t in tensors} == {device}
    state = sw.full_state_dict(model)
    assert {t.device.type for t in state.values()} == {"cpu"}
    if before is not None:
        assert all(torch.equal(state[name], value) for name, value in before.items())


def test_the_loader_puts_batches_on_the_device(world, device):
    samples = [torch.arange(i, i + 9) % 64 for i in range(8)]
    for window in sw.Loader(samples, world, global_batch=4, micro_batch=2):
        assert {t.device for batch in window for t in batch.values()} == {device}


def test_weights_are_written_and_evaluated_from_the_device(world, tmp_path):
    from safetensors.torch import load_file

    model = sw.parallelize(small, world, sharding=sw.Sharding(engine="fsdp2"))
    (batch,) = windows(1, SMALL.vocab, micro=1)[0]
    figures = sw.evaluate(model, [batch])
    stored = load_file(sw.save_weights(model, tmp_path))
    plain = small().cuda()
    plain.load_state_dict(stored)
    with torch.no_grad():
        loss = sw.next_token_loss(plain(batch["input_ids"]), batch) / figures["num_tokens"]
    assert figures["loss"] == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("offload", [False, True])
def test_weights_and_optimizer_state_go_out_and_come_in_to_the_last_bit(world, tmp_path, offload):
    options = sw.Sharding(engine="fsdp2", offload=offload)
    model = sw.parallelize(small, world, sharding=options)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    sw.TrainStep(model, optim, loss=sw.next_token_loss)(windows(1, SMALL.vocab)[0])
    sw.save_weights(model, tmp_path / "w")
    state, moments = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optim)
    for load in (
        lambda other: sw.load_weights(other, tmp_path / "w"),
        lambda other: sw.load_weights(other, tmp_path / "w", shared_files=False),
        lambda other: sw.load_full_state_dict(other, state),
    ):
        other = sw.parallelize(small, world, init="load", sharding=options)
        load(other)
        again = torch.optim.AdamW(other.parameters(), lr=0.01, fused=True)
        sw.load_full_optimizer_state_dict(other, again, moments)
        found = sw.full_state_dict(other)
        assert all(torch.equal(found[name], value) for name, value in state.items())
        same = sw.full_optimizer_state_dict(other, again)["state"]
        assert all(torch.equal(same[n][k], v) for n, values in moments["state"].items() for k, v in values.items())
        sw.TrainStep(other, again, loss=sw.next_token_loss)(windows(1, SMALL.vocab)[0])


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_seeded_values_are_those_of_the_cpu_bit_for_bit(device, engine):
    found = []
    for where in ("cpu", "cuda"):
        with sw.init("dp_shard=1", device=where, seed=3) as world:
            model = sw.parallelize(small, world, sharding=sw.Sharding(engine=engine))
            found.append(sw.full_state_dict(model) | {f"buffer {n}": b.cpu() for n, b in model.named_buffers()})
    cpu, cuda = found
    assert cpu.keys() == cuda.keys()
    assert [name for name in cpu if not torch.equal(cpu[name], cuda[name])] == []


# ---- the step ------------------------------------------------------------------------------------------------------


def plain_run(model: nn.Module, optim: torch.optim.Optimizer, made: list) -> list[float]:
    """The same training by torch alone, on the device."""
    losses = []
    for window in made:
        tokens = sum(int((batch["labels"] != -100).sum()) for batch in window)
        sums = [sw.next_token_loss(model(batch["input_ids"]), batch) for batch in window]
        for value in sums:
            (value / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(float(sum(value.detach() for value in sums)) / tokens)
    return losses


@pytest.mark.parametrize("options", [{"engine": "ddp"}, {"engine": "fsdp2"}, {"engine": "fsdp2", "min_unit_bytes": 0}])
def test_the_same_numbers_as_plain_torch_on_the_device(world, device, options):
    torch.manual_seed(0)
    module = small().double()
    plain = small().double()
    plain.load_state_dict(module.state_dict())
    plain = plain.to(device)
    made = windows(3, SMALL.vocab)
    wanted = plain_run(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), made)
    model = sw.parallelize(module, world, sharding=sw.Sharding(**options))
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = sw.TrainStep(model, optim, max_grad_norm=1.0)
    losses = [step(window).loss for window in made]
    assert losses == pytest.approx(wanted, rel=1e-10)
    state = sw.full_state_dict(model)
    for name, param in plain.state_dict().items():
        err = float((state[name] - param.cpu()).abs().max() / param.abs().max())
        assert err <= 1e-10, f"{name}: {err:.1e}"


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_on_local_shards_is_adamw(world, device, fused):
    torch.manual_seed(0)
    module = small().double()
    plain = small().double()
    plain.load_state_dict(module.state_dict())
    plain = plain.to(device)
    made = windows(3, SMALL.vocab)
    wanted = plain_run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=fused), made)
    model = sw.parallelize(module, world, sharding=sw.Sharding(engine="fsdp2"))
    step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), max_grad_norm=1.0)
    assert [step(window).loss for window in made] == pytest.approx(wanted, rel=1e-9)


def test_dropout_is_a_function_of_the_seed_and_leaves_the_generators_alone(world):
    losses = []
    for _ in range(2):
        torch.cuda.manual_seed(len(losses))  # what was drawn before must not matter
        model = sw.parallelize(Dropping, world)
        step = sw.TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        losses.append([step(window).loss for window in windows(3)])
        after = torch.cuda.get_rng_state(), torch.get_rng_state()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    model.eval()
    assert sw.evaluate(model, windows(1)[0])["loss"] != pytest.approx(losses[1][-1], rel=1e-6)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_loss_that_is_not_finite_is_refused_and_changes_nothing(world, engine):
    model = sw.parallelize(small, world, sharding=sw.Sharding(engine=engine))
    before = sw.full_state_dict(model)

    def broken(output, batch):
        return sw.next_token_loss(output, batch) * float("nan")

    step = sw.TrainStep(model, torch.optim.AdamW(model.parameters()), loss=broken)
    with pytest.raises(sw.NonFiniteError):
        step(windows(1, SMALL.vocab)[0])
    after = sw.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bf16_trains_like_fp32(device):
    losses = {}
    for precision in ("fp32", "bf16"):
        with sw.init("dp_shard=1") as world:
            model = sw.parallelize(small, world, precision=precision)
            seen = []
            model.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
            step = sw.TrainStep(model, torch.optim.AdamW(model.parameters(), lr=3e-3), max_grad_norm=1.0)
            made = windows(4, SMALL.vocab)
            losses[precision] = [step(window).loss for _ in range(10) for window in made]
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert set(seen) == {torch.float32 if precision == "fp32" else torch.bfloat16}
    assert losses["fp32"][-1] < losses["fp32"][0] - 1
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_memory_is_what_the_recipe_says(world, device):
    def requested() -> int:
        # Not memory_allocated: the allocator gives a tensor of 11 MiB a whole block of 12, and counts 12.
        return torch.cuda.memory_stats(device)["requested_bytes.all.current"]

    # 94 M: kernels' own scratch space, tens of MiB, is a few percent of that.
    config = ReferenceConfig(dim=1024, num_layers=8, num_heads=16, num_kv_heads=8, ffn=2816)
    torch.cuda.reset_peak_memory_stats(device)
    start = requested()
    model = sw.parallelize(lambda: ReferenceModel(config), world, sharding=sw.Sharding(engine="fsdp2"))
    planned = sw.recipe_of(model).at(0).num_bytes()
    buffers = sum(b.nbytes for b in model.buffers())
    held = requested() - start
    tensors = len([*model.parameters(), *model.buffers()])
    assert planned == sum(p.numel() * p.element_size() for p in model.parameters())
    assert 0 <= held - planned - buffers <= 512 * tensors + (1 << 20)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = sw.TrainStep(model, optim, max_grad_norm=1.0)
    for window in windows(2, config.vocab):
        step(window)
    held = requested() - start
    assert held == pytest.approx(3 * planned, rel=0.1)  # parameters and AdamW's two means; gradients are gone
    peak = torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - start
    assert peak >= 4 * planned  # with the gradients of a step


# ---- the demo ------------------------------------------------------------------------------------------------------


def test_the_demos_model_trains_and_its_curve_is_that_of_the_cpu(device):
    losses = {}
    for where in ("cuda", "cpu"):
        config = load_config(None, ["--train.steps=20", f"--launch.device={where}"]).config
        with sw.init(config.parallel.layout, device=where, seed=config.train.seed) as world:
            model = build_model(config, world)
            optim = make_optimizer(config.optim, model)
            scheduler = make_scheduler(config.schedule, optim, config.train.steps)
            step = sw.TrainStep(model, optim, scheduler=scheduler, max_grad_norm=config.train.max_grad_norm)
            corpus = open_data(config.data, vocab=vocab_of(config))
            data = config.data
            loader = sw.Loader(corpus.train, world, global_batch=data.global_batch, micro_batch=data.micro_batch)
            losses[where] = [step(window).loss for window, _ in zip(loader, range(20), strict=False)]
    assert len(losses["cuda"]) == 20
    assert losses["cuda"][-1] < losses["cuda"][0] - 1.5
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-3)
