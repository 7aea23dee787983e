"""Types of the numbers that options take, with their limits. Torch-free."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
AboveOne = Annotated[float, msgspec.Meta(gt=1)]
Shrink = Annotated[float, msgspec.Meta(gt=0, lt=1)]
