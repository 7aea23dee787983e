"""The tokenizer that TRL asks for: the samples have tokens already."""

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def tokenizer(vocab: int = 61) -> PreTrainedTokenizerFast:
    words = models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="t0", eos_token="t1")
