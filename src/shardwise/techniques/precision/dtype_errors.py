"""Translates torch's errors about floating dtypes that differ in a forward."""

import re
import weakref

from torch import nn

from shardwise.errors import ShardwiseError, UnsupportedError, first_line
from shardwise.model.names import module_of_error


def explain_dtypes(root: "weakref.ref[nn.Module]", error: BaseException) -> ShardwiseError | None:
    """The ShardwiseError for torch's errors about dtypes that differ; None of any other error."""
    module = root()
    return unfit_dtypes(module_of_error(module, error), error) if module is not None and is_of_dtypes(error) else None


def is_of_dtypes(error: BaseException) -> bool:
    """Whether torch refused floating tensors of different dtypes."""
    if not isinstance(error, RuntimeError | ValueError) or isinstance(error, ShardwiseError):
        return False
    text = str(error)
    return _DIFFERENT.search(text) is not None and _OTHERS.search(text) is None


_DIFFERENT = re.compile(
    r"same (d|scalar )?type|mixed dtype|expected (scalar type|dtype)|bias type|type promoti|dtypes? (to )?match|match .*dtype|dtype to be equal",
    re.I,
)
_OTHERS = re.compile(r"\b(Long|Int|Short|Byte|Char|Bool|u?int\d+|Complex\w*)\b")


def unfit_dtypes(name: str | None, error: BaseException, *, is_compiled: bool = False) -> UnsupportedError:
    """The error for dtypes that differ in the forward of a module."""
    what, rest = "", ""
    if is_compiled:
        what, rest = " in a compiled block", "; in a compiled block that is checkpointed too nothing is cast"
    home = f"the module in one dtype: Precision(..., parts={{{name!r}: 'fp32'}})"
    if name is None:
        home = "it in one dtype, in a module of its own: Precision(..., parts={'NAME': 'fp32'})"
    return UnsupportedError(
        f"a function that is given two floating dtypes{what} under precision=",
        why=f"{first_line(error)}: layers and products are cast where dtypes differ in the first run of a module, nothing else "
        f"is{rest}",
        fix=f"cast there, x.to(y.dtype); or compute {home}"
        + ("; or leave the block out: Compile(targets=...)" if is_compiled else ""),
        name=name,
    )
