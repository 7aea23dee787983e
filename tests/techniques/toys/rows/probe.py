"""What only the module can tell: which layers follow a norm."""

import itertools

from torch import nn


def probe(module, example, draft, world, *, rows):
    found = []
    for prefix, parent in module.named_modules() if rows else ():
        children = [(f"{prefix}.{name}".lstrip("."), child) for name, child in parent.named_children()]
        for (norm, a), (linear, b) in itertools.pairwise(children):
            if isinstance(a, nn.LayerNorm) and isinstance(b, nn.Linear):
                found.append([norm, linear])
    return {"regions": found}
