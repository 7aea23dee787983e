"""Prints which CUDA device PyTorch sees; if it sees none, prints why nothing was tested, with exit status 1."""

import sys

__all__ = ["main"]


def main() -> int:
    """Look for a device. Returns the exit status."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(0)
        name = torch.cuda.get_device_name(0)
        print(f"{name}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, PyTorch {torch.__version__}")
        return 0
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    print(
        "No CUDA device: no GPU test was run.\n"
        f"  why: PyTorch {torch.__version__} ({build}) sees none\n"
        "  fix: run on a machine with an NVIDIA device, with a CUDA build of PyTorch: make gpu PYTHON=/path/to/python",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
