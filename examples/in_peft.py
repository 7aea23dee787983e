"""Opens the adapters of a run in PEFT, and its merged weights in transformers: both give the same logits, and answer alike.

python examples/small_chat.py runs/chat           # a tiny model directory and conversations
shardwise train examples/chat.yaml                # what stands here for a pretrained model
shardwise train examples/lora.yaml
python examples/in_peft.py runs/chat-lora         # needs peft and bitsandbytes; nothing here knows of Shardwise
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(run: str, question: str = "What does a red cow do?") -> float:
    """Returns the largest difference of a logit."""
    adapter, base, merged = (Path(run, name) for name in ("adapter", "base", "weights"))
    tokenizer = AutoTokenizer.from_pretrained(merged)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]

    # On some CPUs bitsandbytes computes with 4 bits in bfloat16: the values of the weights are taken, as on the ranks.
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).dequantize().eval()
    before = answer(plain, tokenizer, prompt)
    with_adapter = PeftModel.from_pretrained(plain, adapter).eval()
    alone = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    with torch.no_grad():
        apart = float((with_adapter(prompt).logits - alone(prompt).logits).abs().max())
    print(f"{question}\n  {base}: {before}")
    print(f"  with {adapter} in PEFT: {answer(with_adapter, tokenizer, prompt)}")
    print(f"  {merged} in transformers: {answer(alone, tokenizer, prompt)}")
    print(f"largest difference of a logit between the two: {apart:.1e}")
    return apart


def answer(model, tokenizer, prompt: torch.Tensor) -> str:
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    return tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    main(sys.argv[1])
