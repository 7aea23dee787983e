import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_llama import conversations
from tiny_qlora import ADAPTER, BASE
from transformers import LlamaForCausalLM

base = LlamaForCausalLM.from_pretrained(BASE)
model = PeftModel.from_pretrained(base, ADAPTER, is_trainable=True)
model.train()  # else bitsandbytes computes in bfloat16 on some CPUs
optim = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
loader = torch.utils.data.DataLoader(conversations(), batch_size=16)

losses = []
for _ in range(2):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.4f}")
model.save_pretrained("adapter")
weights = load_file("adapter/adapter_model.safetensors")
