"""What the scripts with weights in 4 bits start from: a directory that transformers and bitsandbytes have written, and adapters of PEFT."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

PLAIN, BASE, ADAPTER = (tempfile.mkdtemp() for _ in range(3))
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))


torch.set_default_dtype(torch.float32)  # bitsandbytes makes its tables in it
torch.manual_seed(0)
_base = build()
_base.save_pretrained(PLAIN)
_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
LlamaForCausalLM.from_pretrained(PLAIN, quantization_config=_bits, dtype=torch.float32).save_pretrained(BASE)
get_peft_model(_base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"])).save_pretrained(
    ADAPTER
)
