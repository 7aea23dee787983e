"""What packed layers know of a rank's part: which rows and inputs of the whole weight its bytes are. And how they are stored."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn

from shardwise.model import dtype_of
from shardwise.model.adapted import out_dim_of
from shardwise.model.nf4 import Packing
from shardwise.model.packed import packed_layers
from shardwise.model.peft_names import names_of_peft
from shardwise.recipe import Recipe, extents
from shardwise.recipe.dtypes import FLOATING
from shardwise.techniques.quantize import bitsandbytes
from shardwise.techniques.quantize.codec import codecs_of
from shardwise.techniques.technique import Act, PackedInFile, PackedTensor
from shardwise.world import World


class QuantizeAct(Act):
    """Tells packed layers where their bytes are in the whole weight."""

    def inside(self, module: nn.Module, recipe: Recipe, world: World) -> None:
        coord = recipe.grid.coord(world.rank)
        for name, layer in packed_layers(module).items():
            param = recipe.params[f"{name}.weight_nf4" if name else "weight_nf4"]
            over_tp = msgspec.structs.replace(param, cuts=tuple(cut for cut in param.cuts if cut.axis == "tp"))
            pieces = extents(over_tp, coord)
            assert param.codec is not None
            out, num = param.codec.shape
            first = 2 * pieces[0].starts[1] if pieces else 0
            here = 2 * pieces[0].sizes[1] if pieces else 0
            rows = tuple((piece.starts[0], piece.sizes[0]) for piece in pieces)
            layer.packing = Packing((out, num), rows, first, min(here, num - first))
            around = {p.compute for p in recipe.params.values() if p.unit == param.unit and p.compute in FLOATING}
            if len(around) == 1:
                layer.weight_dtype = dtype_of(around.pop())

    def codecs(self, runtime: Any) -> Mapping[str, PackedTensor]:
        return codecs_of(runtime.recipe, runtime.world.rank)

    def packed_in(
        self, tensors: Mapping[str, Any], load: Callable[[str], Tensor], settings: Mapping[str, Any] | None, place: str
    ) -> Mapping[str, PackedInFile]:
        return bitsandbytes.found(tensors, load, settings, place)

    def packed_names(self, names: Iterable[str]) -> Sequence[str]:
        return [name for name in names if name.endswith((".weight_nf4", ".weight_nf4_scales"))]

    def packed_settings(self, runtime: Any, prefix: str) -> Mapping[str, Any]:
        packed = codecs_of(runtime.recipe, runtime.world.rank)
        if not packed:
            return {}
        names = names_of_peft(runtime.module)
        layers = [name for name, layer in runtime.modules if out_dim_of(layer) == 0 and name and ".lora_" not in name]
        plain = [names.bare(name).removeprefix(prefix) for name in layers if f"{name}.weight" not in packed]
        return bitsandbytes.config(next(iter(packed.values())).dtype, plain)
