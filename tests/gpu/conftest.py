"""The device that every test of this folder needs."""

import gc

import pytest
import torch

NEEDS = (
    "no CUDA device: this build of PyTorch sees none. `make gpu` says what there is; on a laptop the rest of the suite "
    "covers everything that does not need one"
)


@pytest.fixture(autouse=True)
def device(request) -> torch.device:
    """The device, with nothing of an earlier test on it."""
    if not torch.cuda.is_available():
        # Asked for by name, a missing device is a failure; met among all tests, it is not.
        (pytest.fail if request.config.option.markexpr.strip() == "gpu" else pytest.skip)(NEEDS)
    gc.collect()
    torch.cuda.init()  # or there is nothing whose statistics could be reset
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    return torch.device("cuda", 0)
