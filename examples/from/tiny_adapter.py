"""What the scripts with adapters start from: a model directory, and adapters beside its layers that PEFT has made."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from tiny_llama import build

BASE, ADAPTER = tempfile.mkdtemp(), tempfile.mkdtemp()
CONFIG = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")

torch.manual_seed(0)
_base = build()
_base.save_pretrained(BASE)
get_peft_model(_base, CONFIG).save_pretrained(ADAPTER)
