"""The words for a dtype that options accept. Torch-free."""

DTYPE_WORDS = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float64": "float64",
    "double": "float64", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64",
}  # fmt: skip
"""Each accepted word, and torch's name for that dtype."""
