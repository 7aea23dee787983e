"""Small tokenizers with chat templates, and a Llama-style model for them, made here."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
_WORDS = "what is the capital of France ? Paris . Hello there , how are you today I am fine thank you very much good bye sum of two and three is five"

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
FORGETS = (  # drops what was thought once the conversation has gone on, as templates of reasoning models do
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if loop.last else m['content'].split('|')[-1]) + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKS = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
RAISES = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}{{ m['content'] }}{% endfor %}"


def tokenizer(
    template: str | None = CHATML,
    *,
    pad: str | None = "<pad>",
    eos: str | None = "<|im_end|>",
    trim_offsets: bool = False,
) -> Any:
    """A byte-level BPE tokenizer that begins a text with ``<s>``."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator([_WORDS] * 4, trainer)
    found.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token=eos, pad_token=pad)
    fast.chat_template = template
    return fast


def model(vocab: int = 400, **changes: Any) -> LlamaForCausalLM:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **{**sizes, **changes}))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=16, n_layer=2, n_head=2, n_positions=64))


def saved(folder: Path, template: str | None = CHATML, **changes: Any) -> Path:
    """A model directory with the tokenizer and a model of its vocabulary."""
    made = tokenizer(template)
    made.save_pretrained(folder)
    model(len(made), **changes).save_pretrained(folder)
    return folder
