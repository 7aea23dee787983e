"""A model that is cut over tp trains as in one process: loss, norm, every gradient, every update; under each engine."""

import models
import pytest

import shardwise as sw

LAYOUTS = {"tp=2": 2, "tp=4": 4, "dp_replicate=2,tp=2": 4, "dp_shard=2,tp=2": 4, "dp_replicate=2,dp_shard=2,tp=2": 8}
OWN = [
    f"linears: {name}"
    for name in (
        "qkv-kv-1",
        "lora",
        "tempered",
        "latent",
        "slopes",
        "steered",
        "value-residual",
        "mixer",
        "norm-of-width",
        "in-place",
        "kept-function",
        "weight-norm",
        "added",
        "hooked",
        "from-the-width, lora",
    )
]
COMPUTED = ["linears: weight-norm", "linears: added"]  # only biases are cut: what weights are computed from is whole
FAMILIES = ["llama", "gpt2", "t5", "qwen3", "mamba"]
PUT_TOGETHER = list(models.select("tp"))
OTHERS = [
    name
    for name, model in models.MODELS.items()
    if model.batch is not None
    and name not in {*OWN, *FAMILIES, *PUT_TOGETHER, "linears: norm-of-heads"}  # that one draws random numbers
]
REFERENCE = models.get("linears: kv-2")


def compared(ranks, name, layout, steps=2, accumulate=2, **options):
    """The report, and the largest share of the parameters that a rank holds."""
    model = models.get(name) if isinstance(name, str) else name
    num_data = LAYOUTS[layout] // (4 if "tp=4" in layout else 2)
    windows = model.windows(steps, num_data * accumulate - (num_data > 1))  # one of the last is padding
    report = sw.verify(
        model.build,
        layout,
        batches=windows,
        loss=model.loss,
        count=model.count,
        forward=model.forward,
        run=ranks.run,
        **options,
    )
    whole = 8 * sum(param.numel() for param in model.build().parameters())
    return report, max(report.bytes_per_rank) / whole


MATRIX = [
    pytest.param(
        layout, accumulate, clip, id=f"{layout}-{accumulate}-{clip}", marks=[] if quick else [pytest.mark.soak]
    )
    for layout in LAYOUTS
    for accumulate in (1, 4)
    for clip in (None, 2.0, float("inf"))
    for quick in [
        (layout, accumulate, clip)
        in {("tp=2", 4, 2.0), ("tp=4", 1, None), ("dp_replicate=2,tp=2", 4, None), ("dp_shard=2,tp=2", 4, float("inf"))}
    ]
]


@pytest.mark.quick("tp=2-4-2.0", "dp_shard=2,tp=2-4-inf")
@pytest.mark.parametrize(("layout", "accumulate", "clip"), MATRIX)
def test_the_reference(ranks, layout, accumulate, clip):
    norm = {} if clip is None else {"max_grad_norm": 0.1, "norm_type": clip}
    report, held = compared(ranks, REFERENCE, layout, accumulate=accumulate, optimizer="adamw", **norm)
    assert report.engine == ("fsdp2" if "dp_shard" in layout else "ddp")
    assert held < {"tp=2": 0.62, "tp=4": 0.43}[layout.split(",")[-1]] / (2 if "dp_shard" in layout else 1) + 0.01


QUICK = ("dp_shard=2,tp=2", "tp=2", "tp=2")  # in turn, and the other layouts in soak
CELLS = [
    *((name, layout, {}, layout != QUICK[i % 3]) for i, name in enumerate(OWN) for layout in LAYOUTS),
    *((name, "tp=2", {}, False) for name in FAMILIES),
    *((name, layout, {}, True) for name in FAMILIES for layout in LAYOUTS if layout != "tp=2"),
    *((name, "tp=2", {"remat": "full"}, name != "linears: value-residual") for name in (*OWN, *FAMILIES)),
    *((name, "dp_shard=2,tp=2", {"remat": "selective"}, name != "linears: qkv-kv-1") for name in (*OWN, *FAMILIES)),
    *(
        (
            name,
            "tp=2",
            {"compile": sw.Compile(backend="aot_eager", fullgraph=True)},
            name not in ("linears: steered", "linears: slopes"),
        )
        for name in (*OWN, *FAMILIES)
        if name not in ("t5", "mamba", "linears: mixer")
    ),
]


@pytest.mark.quick(
    "linears: mixer-tp=2-",
    "linears: norm-of-width-tp=2-",
    "linears: in-place-dp_shard=2,tp=2-",
    "linears: weight-norm-tp=2-",
    "linears: from-the-width, lora-tp=2-",
    "gpt2-tp=2-",
    "qwen3-tp=2-",
    "linears: value-residual-tp=2-remat",
    "linears: qkv-kv-1-dp_shard=2,tp=2-remat",
    "linears: steered-tp=2-compile",
)
@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        pytest.param(
            name, layout, options, id=f"{name}-{layout}-{'-'.join(options)}", marks=[pytest.mark.soak] if slow else []
        )
        for name, layout, options, slow in CELLS
    ],
)
def test_models(ranks, name, layout, options):
    _report, held = compared(ranks, name, layout, **options)
    most = 0.95 if name in COMPUTED else 0.85
    assert held < (0.55 if "dp_shard" in layout else most)


@pytest.mark.quick("falcon: groups-tp=2")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if layout == "tp=2" and name.startswith("falcon") else [pytest.mark.soak])
        for name in PUT_TOGETHER
        for layout in ("tp=2", "dp_shard=2,tp=2", "tp=4")
    ],
)
def test_families_whose_layers_are_put_together_in_other_ways(ranks, name, layout):
    """Falcon's three layouts of q, k and v in one layer; norms over the width; latent attention and experts."""
    _report, held = compared(ranks, name, layout)
    assert held < {"tp=2": 0.62, "tp=4": 0.72, "dp_shard=2,tp=2": 0.35}[layout] + 0.2 * ("deepseek" in name)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of other packages
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "tp=2") for name in OTHERS),
        *((name, "tp=4") for name in ("bert", "vit", "mixtral", "falcon", "gpt-neox", "bloom", "opt", "nanogpt")),
    ],
)
def test_every_other_model(ranks, name, layout):
    """Convolutions, recurrent layers, graphs, attention of all kinds: what cannot be cut is whole on every rank, and right."""
    compared(ranks, name, layout, sharding=sw.Sharding(units=models.get(name).units))


SHAPES = {
    "linears: slopes": False,
    "linears: table": True,
    "bloom": False,
    "t5": True,
    "linears: from-the-width": True,
    "nanogpt": True,
}


@pytest.mark.quick("linears: slopes")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if slow else []) for name, slow in SHAPES.items()]
)
def test_micro_batches_of_other_sizes_than_the_example(ranks, name):
    """Some tensors between layers have a dim of heads times samples."""
    model = models.get(name)
    first, *others = model.windows(1, 5)[0]
    others = [{key: value[: 1 + i % 2, : 3 + i] for key, value in batch.items()} for i, batch in enumerate(others)]
    longer = {key: value.repeat(2, 1) for key, value in first.items()}
    report = sw.verify(
        model.build, "tp=2", batches=[[first, *others], [longer]], loss=model.loss, forward=model.forward, run=ranks.run
    )
    assert report
