"""Generates completions of a prompt, and measures how many of their words occur in the training text."""

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.data.sft.dataset import SFTDataset
from shardwise.errors import ConfigError
from shardwise.model.mode import eval_mode
from shardwise.parallel import world_of
from shardwise.run.config import RunConfig

SAMPLE_BYTES = 160
SAMPLE_TEMPERATURE = 0.6
ANSWER_TOKENS = 48
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: int | None = None,
    on_token: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Generates tokens, one at a time; every rank must call it, with the same arguments.

    Each token is one call of the module itself, so that a sharded model gathers its parameters as in training, and
    all ranks make equally many calls. Tokens are drawn on the CPU from a separate generator: the same on every rank,
    and the training's random numbers do not change. The module runs in eval mode; afterwards each part is in the mode that it had.

    Args:
        model: ``model(input_ids [B, T]) -> logits [B, T, V]``.
        prompt: integers [B, T], T >= 1, on the model's device.
        context: most positions that the model may see at once; the last ones are used.
        temperature: 0 takes the most likely token; larger values draw from softmax(logits / temperature).
        stop: a token after which no more are made, once it has come in each sequence.
        on_token: called with each token of the sequences, [B, 1].

    Returns:
        integers [B, T + num_tokens], including the prompt; fewer columns where ``stop`` ended it.
    """
    if prompt.dim() != 2 or prompt.shape[1] < 1 or temperature < 0 or context < 1:
        raise ConfigError(
            f"generate() with a prompt of shape {list(prompt.shape)}, temperature={temperature}, context={context}",
            why="it continues sequences [B, T] of at least one token, with temperature >= 0 and context >= 1",
            fix="give at least one token as prompt, and temperature=0.0 for the most likely continuation",
        )
    draws, begin = torch.Generator().manual_seed(seed), prompt.shape[1]
    with contextlib.ExitStack() as stack:
        if isinstance(model, FSDPModule):
            stack.callback(
                model.reshard
            )  # plain FSDP2 keeps what the root's last forward gathered, and would use it again
        stack.enter_context(eval_mode(model))
        for _ in range(num_tokens):
            out = model(prompt[:, -context:])
            logits = _logits_in(out)[:, -1].float().cpu()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draws)
            prompt = torch.cat((prompt, token.to(prompt)), dim=1)
            if on_token is not None:
                on_token(token)
            if stop is not None and bool((prompt[:, begin:] == stop).any(1).all()):
                break
    return prompt


def _logits_in(output: Any) -> Tensor:
    """The logits [B, T, V] in what a model returned: an object of transformers, a mapping, or a tuple of logits and a loss."""
    if isinstance(output, tuple | list) and not hasattr(output, "logits"):
        return next((part for part in output if isinstance(part, Tensor) and part.dim() == 3), output[0])
    return output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)


def answer(model: nn.Module, records: SFTDataset, context: int) -> dict[str, str]:
    """The model's answer to the first record, with the prompt and the answer of the record; every rank must call it."""
    ids, prompt, reference = records.question()
    made = generate(
        model, torch.tensor([ids], device=world_of(model).device), ANSWER_TOKENS, context=context, stop=records.end
    )
    return {"prompt": prompt, "text": records.decode(made[0, len(ids) :].tolist()), "reference": reference}


def complete(model: nn.Module, text: str, prompt: str, config: RunConfig) -> dict[str, Any]:
    """A completion of a prompt by a byte-level model, and on rank 0 the share of its words that are in the training ``text``; every
    rank must call it."""
    world = world_of(model)
    written = complete_text(
        model,
        prompt,
        SAMPLE_BYTES,
        device=world.device,
        context=config.data.seq_len,
        temperature=SAMPLE_TEMPERATURE,
        seed=config.train.seed,
    )
    # On rank 0 only: collecting the words of a long text takes a moment.
    share = word_share(written, vocabulary(text)) if world.is_main else None
    return {"prompt": prompt, "text": written, "word_share": share}


def complete_text(model: nn.Module, prompt: str, num_bytes: int, *, device: torch.device, **options: object) -> str:
    """Continues a text with a byte-level model; every rank must call it.

    Returns:
        only the continuation; bytes that are not UTF-8 and tokens that are not bytes appear as the replacement
        character.
    """
    data = prompt.encode()
    ids = torch.tensor([list(data)], dtype=torch.long, device=device)
    out = generate(model, ids, num_bytes, **options)[0].tolist()  # type: ignore[arg-type]
    # 0xFF occurs in no UTF-8 text: it marks tokens above 255 of a model with a larger vocabulary.
    return bytes(min(token, 0xFF) for token in out[len(data) :]).decode(errors="replace")


def vocabulary(text: str) -> frozenset[str]:
    """The set of words in a text: runs of letters, in lower case."""
    return frozenset(word.lower() for word in _WORD.findall(text))


def word_share(completion: str, words: Iterable[str]) -> float:
    """The share of a completion's words that are in ``words``, from 0.0 to 1.0; 0.0 if it has none.

    The last word is left out if the completion may have stopped in the middle of it. Of one-letter words only "a" and
    "i" count as real: any letter stands alone somewhere in a text, and random output is full of them.
    """
    known = words if isinstance(words, (set, frozenset)) else frozenset(words)
    whole_words = [match.group().lower() for match in _WORD.finditer(completion) if match.end() < len(completion)]
    num_real = sum(word in known and (len(word) > 1 or word in ("a", "i")) for word in whole_words)
    return num_real / len(whole_words) if whole_words else 0.0
