"""What is left in memory."""

import gc

from torch import Tensor


def bytes_in_memory() -> int:
    """Bytes of the storages of all tensors that Python can reach, once what is no longer used has been collected."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and not x.is_meta]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
