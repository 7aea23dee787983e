"""Compares the tokens and labels of fine-tuning data with those of TRL's SFTTrainer: what is trained on, token by token.

    pip install trl datasets
    python benchmarks/sft_labels.py

Four kinds of records (conversations by a template that marks its answers, prompts of messages, prompts of text, texts), through one
small tokenizer that is made here. Exit status 1: something differs.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import shardwise as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from models import chat

__all__ = ["RECORDS", "compare"]

USER, ANSWER = {"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "I am fine"}
MORE, BYE = {"role": "user", "content": "good bye"}, {"role": "assistant", "content": "bye"}
SYSTEM = {"role": "system", "content": "be good"}
RECORDS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "conversations, answers marked": (
        chat.MARKED,
        [{"messages": [USER, ANSWER, MORE, BYE]}, {"messages": [SYSTEM, USER, ANSWER]}],
        {"assistant_only_loss": True},
    ),
    "prompts of messages": (
        chat.CHATML,
        [{"prompt": [USER], "completion": [ANSWER]}, {"prompt": [SYSTEM, USER, ANSWER, MORE], "completion": [BYE]}],
        {},
    ),
    "prompts of text": (
        chat.CHATML,
        [
            {"prompt": "Hello", "completion": " there"},
            {"prompt": "what is the", "completion": " capital of France ? Paris"},
        ],
        {},
    ),
    "texts": (chat.CHATML, [{"text": "Hello there"}, {"text": "I am fine thank you"}], {}),
}


def compare(template: str, records: list[dict[str, Any]], options: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Labels that are equal in both, and all of TRL's, inputs included."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = chat.tokenizer(template)
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    args = SFTConfig(output_dir=str(folder), report_to=[], max_length=200, use_cpu=True, bf16=False, **options)
    trainer = SFTTrainer(
        chat.model(len(tokenizer)), args=args, train_dataset=Dataset.from_list(records), processing_class=tokenizer
    )
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(len(records))])
    data, same, of_all = sw.SFTDataset(path, tokenizer, seq_len=200), 0, 0
    for i, theirs in enumerate(zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)):
        ids, labels, _ = (row[theirs[2].bool()] for row in theirs)
        wanted = torch.stack([ids[:-1], labels[1:]])
        of_all += wanted.shape[1]
        found = torch.stack([data[i]["input_ids"], data[i]["labels"]])
        same += int((wanted == found).all(0).sum()) if wanted.shape == found.shape else 0
    return same, of_all


def main() -> int:
    differs = False
    print("| records | tokens of TRL | equal, input and label |\n|---|--:|--:|")
    for name, given in RECORDS.items():
        with tempfile.TemporaryDirectory() as folder:
            same, of_all = compare(*given, Path(folder))
        differs = differs or same != of_all
        print(f"| {name} | {of_all} | {same} |")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
