"""A small model's weights in three of the kinds that ``shardwise convert`` reads, in the working directory::

python examples/example_convert.py
shardwise convert llama-hf llama.pth --map llama-to-meta --verify
"""

import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

DIM, HEADS, KV_HEADS, FFN, VOCAB, LAYERS = 32, 4, 2, 64, 128, 2


def weights() -> dict[str, torch.Tensor]:
    """Random ones, under the names that Hugging Face has for Llama."""
    torch.manual_seed(0)
    kv = DIM * KV_HEADS // HEADS
    layer = {
        "self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (kv, DIM), "self_attn.v_proj": (kv, DIM), "self_attn.o_proj": (DIM, DIM),
        "mlp.gate_proj": (FFN, DIM), "mlp.up_proj": (FFN, DIM), "mlp.down_proj": (DIM, FFN),
        "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (VOCAB, DIM), "model.norm": (DIM,), "lm_head": (VOCAB, DIM)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def main() -> None:
    state = weights()
    folder = Path("llama-hf")
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"model": state, "optimizer": {"lr": 3e-4}, "step": 1000}, "checkpoint.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process without a group
        dcp.save({"model": state, "optim": {"lr": 3e-4}}, checkpoint_id="step-1000", no_dist=True)


if __name__ == "__main__":
    main()
