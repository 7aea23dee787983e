import torch
from tiny_llama import build, conversations
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
model = build()
args = TrainingArguments(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-2,
    lr_scheduler_type="linear",
    max_grad_norm=1.0,
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model=model, args=args, train_dataset=conversations())
trainer.train()

losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
weights = model.state_dict()
