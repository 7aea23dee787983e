"""A tiny Llama-style model directory with a tokenizer and a chat template, and conversations to fine-tune it on.

python examples/small_chat.py runs/chat        # seconds
shardwise train examples/chat.yaml             # on two local ranks, half a minute to two minutes on a CPU

Nothing here knows of Shardwise: the directory is what save_pretrained writes, and chat.jsonl has a conversation in each line. In
swapped.jsonl each animal has the voice of the next one: what examples/lora.yaml teaches a model that has learned the first.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANIMALS = {"dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "lion": "roars", "bee": "buzzes"}
COLOURS = ("red", "blue", "green", "white", "black")


def conversations(num: int, swapped: bool = False) -> list[dict]:
    """Questions of which the answers can be learned: what an animal does, sums, and what was said before."""
    draw = random.Random(0)
    found, voices = [], list(ANIMALS.values())
    does = dict(zip(ANIMALS, voices[1:] + voices[:1] if swapped else voices, strict=True))
    for _ in range(num):
        animal, colour = draw.choice(list(ANIMALS)), draw.choice(COLOURS)
        a, b = draw.randrange(5), draw.randrange(5)
        turns = [
            (f"What does a {colour} {animal} do?", f"A {colour} {animal} {does[animal]}."),
            (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
            ("Which animal was it?", f"It was the {animal}."),
        ][: draw.randint(1, 3)]
        messages = [{"role": "system", "content": "Answer in one sentence."}] if draw.random() < 0.3 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def main(dest: str, num: int) -> None:
    folder = Path(dest)
    folder.mkdir(parents=True, exist_ok=True)
    found = conversations(num)
    tokenizer = make_tokenizer([message["content"] for each in found for message in each["messages"]])
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, **sizes
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, records in (("chat", found), ("swapped", conversations(num, swapped=True))):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", help="the directory to write")
    parser.add_argument("--num", type=int, default=600, help="conversations (600)")
    args = parser.parse_args()
    main(args.dest, args.num)
    print(f"a model, its tokenizer and {args.num} conversations are in {args.dest}")
