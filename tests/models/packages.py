"""Models imported unmodified from packages that know nothing of Shardwise, each with what makes it hard.

Only settings are given: sizes are small, dropout is off (parity is against one process, whose masks are its own). Imports
stand in the functions, so that a rank loads only what it builds.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from models.batches import (
    VOCAB,
    all_values,
    class_loss,
    graphs,
    grids,
    masks,
    noisy,
    series,
    spectrograms,
    squared_error,
    tokens,
)
from models.record import Model


def imported(where: str, **settings: Any) -> nn.Module:
    """The class at ``"module:name"``, called with ``settings``."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)(**settings)


def language_model(layers: str, depth: int = 3, **settings: Any) -> nn.Module:
    from x_transformers import TransformerWrapper

    stack = imported(f"x_transformers:{layers}", dim=12, depth=depth, heads=2, attn_dim_head=6, **settings)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=16, attn_layers=stack)


class Recogniser(nn.Module):
    """What a user puts around a Conformer, which maps frames to frames."""

    def __init__(self) -> None:
        super().__init__()
        from conformer import Conformer

        self.inward, self.outward = nn.Linear(8, 12), nn.Linear(12, VOCAB)
        self.body = Conformer(dim=12, depth=3, dim_head=6, heads=2, conv_kernel_size=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.body(self.inward(x)))


def _package(
    name: str, kind: str, package: str, where: str, hard: str, batch: Any, settings: dict[str, Any], **contract: Any
) -> Model:
    build = functools.partial(imported, where, **settings)
    return _built(name, kind, package, where.partition(":")[2], hard, batch, build, **contract)


def _built(
    name: str,
    kind: str,
    package: str,
    model: str,
    hard: str,
    batch: Any,
    build: Callable[[], nn.Module],
    **contract: Any,
) -> Model:
    return Model(
        name=name,
        build=build,
        batch=batch,
        kind=kind,
        model=model,
        hard=hard,
        package=package,
        tags=("package", "foreign"),
        **contract,
    )


_CLASSES = {"loss": class_loss}
_VALUES = {"loss": squared_error, "count": all_values}
_2D = {"spatial_dims": 2, "in_channels": 1}
_GRAPH = {"in_channels": 8, "hidden_channels": 12, "num_layers": 4, "out_channels": 5}

MODELS = (
    _built(
        "x-decoder",
        "language",
        "x-transformers",
        "TransformerWrapper, Decoder",
        "lists of lists, rotary positions, gated feed-forward",
        tokens,
        functools.partial(language_model, "Decoder", rotary_pos_emb=True, ff_glu=True),
    ),
    _built(
        "x-encoder",
        "language",
        "x-transformers",
        "TransformerWrapper, Encoder",
        "RMS norms of its own, one table of relative positions for every block",
        tokens,
        functools.partial(language_model, "Encoder", use_rmsnorm=True, rel_pos_bias=True),
    ),
    _built(
        "conformer",
        "speech",
        "conformer",
        "Conformer",
        "batch norm and convolutions beside attention",
        spectrograms,
        Recogniser,
    ),
    _package(
        "monai-unet",
        "image",
        "monai",
        "monai.networks.nets:UNet",
        "each level holds the next: a list inside a list",
        masks,
        {**_2D, "out_channels": 3, "channels": (4, 6, 8), "strides": (2, 2), "num_res_units": 1, "norm": "batch"},
        **_CLASSES,
    ),
    _package(
        "monai-densenet",
        "image",
        "monai",
        "monai.networks.nets:DenseNet",
        "batch norm, every layer reads all before it",
        grids,
        {**_2D, "out_channels": 5, "init_features": 6, "growth_rate": 4, "block_config": (2, 2), "bn_size": 2},
        **_CLASSES,
    ),
    _package(
        "monai-swin-unetr",
        "image",
        "monai",
        "monai.networks.nets:SwinUNETR",
        "shifted windows, tables of relative positions, skips from every stage",
        functools.partial(masks, side=64),
        {
            **_2D,
            "out_channels": 3,
            "feature_size": 12,
            "depths": (2, 2, 1, 1),
            "num_heads": (1, 1, 2, 2),
            "window_size": 4,
        },
        **_CLASSES,
    ),
    _package(
        "monai-diffusion",
        "image",
        "monai",
        "monai.networks.nets:DiffusionModelUNet",
        "outputs of the way down are popped on the way up",
        noisy,
        {
            **_2D,
            "out_channels": 1,
            "num_res_blocks": 1,
            "channels": (4, 8),
            "attention_levels": (False, True),
            "norm_num_groups": 2,
            "num_head_channels": 4,
        },
        **_VALUES,
    ),
    _package(
        "pyg-gcn",
        "graph",
        "torch-geometric",
        "torch_geometric.nn:GCN",
        "another number of nodes and edges in every micro-batch",
        graphs,
        {**_GRAPH, "norm": "BatchNorm"},
        **_CLASSES,
    ),
    _package(
        "pyg-gat",
        "graph",
        "torch-geometric",
        "torch_geometric.nn:GAT",
        "attention over edges, parameters with a dimension of 1",
        graphs,
        {**_GRAPH, "heads": 2, "jk": "cat"},
        **_CLASSES,
    ),
    _package(
        "tcn",
        "time series",
        "pytorch-tcn",
        "pytorch_tcn:TCN",
        "weight norm, layers inherited from Conv1d, buffers of the past",
        series,
        {
            "num_inputs": 4,
            "num_channels": [6, 6, 8],
            "dropout": 0.0,
            "input_shape": "NLC",
            "output_projection": 4,
            "use_skip_connections": True,
        },
        **_VALUES,
    ),
    _package(
        "itransformer",
        "time series",
        "iTransformer",
        "iTransformer:iTransformer",
        "lists of lists, types checked at every call, a dict of outputs",
        series,
        {
            "num_variates": 4,
            "lookback_len": 12,
            "depth": 3,
            "dim": 12,
            "pred_length": 12,
            "dim_head": 6,
            "heads": 2,
        },
        **_VALUES,
    ),
)
