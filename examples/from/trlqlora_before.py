import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from tiny_llama import conversations
from tiny_qlora import ADAPTER, PLAIN
from tiny_trl import tokenizer
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
base = LlamaForCausalLM.from_pretrained(PLAIN, quantization_config=bits, dtype=torch.float32)
model = PeftModel.from_pretrained(base, ADAPTER, is_trainable=True)
args = SFTConfig(
    output_dir="adapter",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
)
rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in conversations()])
trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer())
trainer.train()

losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
model.save_pretrained("adapter")
weights = load_file("adapter/adapter_model.safetensors")
