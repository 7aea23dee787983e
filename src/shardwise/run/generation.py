"""Generates a text with the model in a directory, in one process: ``shardwise generate``.

Models of transformers generate by their own ``generate``, with its key/value cache; the reference model by
:func:`~shardwise.run.sample.generate`, which runs the whole context for each token.
"""

import codecs
import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.folders import MANIFEST
from shardwise.data.sft.encode_record import load_tokenizer, rendered
from shardwise.errors import ConfigError, first_line
from shardwise.model import dtype_of
from shardwise.run.build import build_plain
from shardwise.run.datasets import rows_of
from shardwise.run.model_folder import ModelFolder
from shardwise.run.pretrained import check_pretrained
from shardwise.run.sample import generate
from shardwise.state.checkpoint.saved_run import SavedRun
from shardwise.state.files import OpenFiles
from shardwise.state.merged import with_adapter
from shardwise.state.stored import InMemoryTensor, Source

Write = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What was generated: ``tokens``, without those of the prompt; how long it took; where, and why it ended. Its text is a
    line for the user."""

    tokens: list[int]
    seconds: float
    device: str
    ended: str

    def __str__(self) -> str:
        num = len(self.tokens)
        return f"{num} token{'s' if num != 1 else ''} in {self.seconds:.1f} s on {self.device}; {self.ended}"


def generate_text(
    source: ModelFolder,
    prompt: str,
    *,
    is_chat: bool,
    max_tokens: int,
    temperature: float,
    seed: int,
    device: str,
    dtype: str | None,
    write: Write,
    adapter: Path | None = None,
) -> Generated:
    """Generates a text, and passes it to ``write`` as it comes.

    Args:
        prompt: what it continues; with ``is_chat`` a user's message, which the chat template makes a prompt of.
        max_tokens: tokens to make at most; fewer where the model's end token comes, or its context is full.
        temperature, seed: 0 takes the most likely token; otherwise tokens are drawn, after the seed.
        dtype: in which it is computed; None: as the weights are stored.
        adapter: a directory of adapters to merge into the model.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda", why="PyTorch sees no CUDA device", fix="use --device cpu, or leave it out")
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    text = _Bytes() if source.tokenizer == "bytes" else _Tokenizer(source.tokenizer)
    ids = text.encode(prompt, is_chat=is_chat)
    if not ids:
        raise ConfigError("an empty prompt", why="a model continues at least one token", fix="give --prompt a text")
    if (source.weights / MANIFEST).is_file():
        SavedRun(source.weights).verify("model")  # of its weights: transformers reads them without their checksums
    with _quiet() if source.is_hf else contextlib.nullcontext():
        model = _open_hf(source.weights, dtype) if source.is_hf else _open_reference(source, dtype)
        if adapter is not None:
            _merge(model, source.weights, adapter)
        model = model.to(place).eval()
        _refuse_unknown(model, ids, text)
        start, stream, prompt_ids = time.perf_counter(), text.stream(write), torch.tensor([ids], device=place)
        if source.run is not None and not source.is_hf:
            drawing: dict[str, Any] = {"temperature": temperature, "seed": seed, "on_token": stream.put_token}
            generate(model, prompt_ids, max_tokens, context=source.run.data.seq_len, **drawing)
            stream.end()
            ended = f"ended by --max-tokens {max_tokens}"
        else:
            torch.manual_seed(seed)
            ended = _generate_hf(model, prompt_ids, text, stream, max_tokens, temperature)
    return Generated(tokens=stream.tokens, seconds=time.perf_counter() - start, device=str(place), ended=ended)


@torch.inference_mode()
def _generate_hf(
    model: Any, prompt: Tensor, text: "_Bytes | _Tokenizer", stream: "_Stream", max_tokens: int, temperature: float
) -> str:
    """Generates by ``generate`` of transformers, and returns why it ended."""
    most, named = _room(model, prompt.shape[1], max_tokens), model.generation_config.eos_token_id
    ends = {end for end in (*(named if isinstance(named, list) else [named]), text.end) if end is not None}
    options = _options_of(model, text, ends, most, temperature)
    model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=options, streamer=stream)
    if {*stream.tokens[-1:]} & ends:
        return f"ended by {text.name(stream.tokens[-1])}"
    if most < max_tokens:
        return f"the context of {prompt.shape[1] + most:,} tokens is full"
    return f"ended by --max-tokens {max_tokens}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within, transformers shows no bars and no notes: stdout and stderr are for the text and for errors."""
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


# ---- models ----------------------------------------------------------------------------------------------------------


def _open_hf(folder: Path, dtype: str | None) -> nn.Module:
    kind, _ = check_pretrained(str(folder), {}, what="DIR")
    given = f"the model in {folder}"
    try:
        model, loading = kind.from_pretrained(
            folder, dtype=dtype_of(dtype) if dtype else "auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        why = first_line(error)
        raise ConfigError(
            given, why=f"transformers cannot open it: {why}", fix="give a directory with a config.json and its weights"
        ) from error
    if loading["missing_keys"]:
        raise ConfigError(
            given,
            why=f"{len(loading['missing_keys'])} tensors are not in its weights, such as {min(loading['missing_keys'])}: they would be drawn at random",
            fix="give the weights that belong to its config.json",
        )
    if (own := min((name for name in loading["unexpected_keys"] if ".lora_" in name), default=None)) is not None:
        raise ConfigError(
            given,
            why=f"its weights have adapters beside them, such as {own}, which transformers would leave out",
            fix="generate from the run, whose final weights are merged: shardwise generate RUN; or from the base: shardwise generate BASE "
            "--adapter RUN/adapter",
        )
    if not (hasattr(model, "can_generate") and model.can_generate()):
        raise ConfigError(
            given,
            why=f"a {type(model).__name__} does not generate text",
            fix="give a causal language model: LlamaForCausalLM and the like",
        )
    return model


@torch.no_grad()
def _merge(model: nn.Module, folder: Path, adapter: Path) -> None:
    params = dict(model.named_parameters())
    if packed := next((name for name, param in params.items() if param.dtype == torch.uint8), None):
        raise ConfigError(
            f"generate {folder} with --adapter {adapter}",
            why="its weights are packed in 4 bits, and an adapter is merged into plain ones",
            fix=f"merge them first: shardwise convert {folder} DEST --adapter {adapter}, and generate DEST",
            name=packed,
        )
    base = {name: InMemoryTensor.of(param) for name, param in params.items()}
    source = Source(place="the model", kind="a model", tensors=base, folder=folder)
    merged = with_adapter(source, adapter, lambda: model)
    with OpenFiles() as files:
        for name, tensor in merged.tensors.items():
            if tensor is not base[name]:
                params[name].copy_(tensor.load(files))


def _open_reference(source: ModelFolder, dtype: str | None) -> nn.Module:
    """The reference model of a run, with its weights; parameters in their dtype, its float32 tables as they are."""
    from safetensors.torch import load_file

    assert source.run is not None
    model = build_plain(source.run)
    stored = {
        name: value for file in sorted(source.weights.glob("*.safetensors")) for name, value in load_file(file).items()
    }
    here = model.state_dict(keep_vars=True)
    got = {id(here[name]) for name in stored if name in here and here[name].shape == stored[name].shape}
    wrong = sorted({*(stored.keys() - here.keys()), *(name for name, value in here.items() if id(value) not in got)})
    if wrong:
        raise ConfigError(
            f"the weights in {source.weights}",
            why=f"they do not fit the configuration of the run: {wrong[0]}{' and others' if len(wrong) > 1 else ''}",
            fix="give the folder of the run that wrote them",
        )
    for name, value in stored.items():
        here[name].data = value.to(dtype_of(dtype)) if dtype and value.is_floating_point() else value
    return model


def _refuse_unknown(model: nn.Module, ids: list[int], text: "_Bytes | _Tokenizer") -> None:
    rows = rows_of(model) or next(
        (each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), None
    )
    if rows is not None and max(ids) >= rows:
        raise ConfigError(
            f"token {max(ids)} ({text.name(max(ids))}) of the prompt",
            why=f"the model's vocabulary has {rows:,} tokens",
            fix="use the tokenizer that the model was made with",
        )


def _room(model: Any, num: int, max_tokens: int) -> int:
    """How many tokens are made: as asked for, or those for which the context has positions."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None) or num + max_tokens
    if num >= most:
        raise ConfigError(
            f"a prompt of {num:,} tokens", why=f"the model has {most:,} positions", fix="give a shorter prompt"
        )
    return min(max_tokens, most - num)


def _options_of(model: Any, text: "_Bytes | _Tokenizer", ends: set[int], most: int, temperature: float) -> Any:
    """The generation configuration of the directory with what was asked for: one sequence, greedy or drawn."""
    options = copy.deepcopy(model.generation_config)
    options.max_length, options.max_new_tokens = None, most
    options.min_length = options.min_new_tokens = None
    options.num_beams, options.num_return_sequences, options.use_cache = 1, 1, True
    options.eos_token_id = sorted(ends) or None
    options.pad_token_id = text.pad if text.pad is not None else min(ends, default=0)
    options.do_sample = temperature > 0
    if temperature > 0:
        options.temperature = temperature
        options.top_k = options.top_k or 0  # 0: all tokens; transformers would take 50
    else:
        options.temperature = options.top_k = options.top_p = options.min_p = options.typical_p = None
    return options


# ---- texts -----------------------------------------------------------------------------------------------------------


class _Stream:
    """Passes the text of tokens on as it is complete; what ``generate`` of transformers calls a streamer."""

    def __init__(self, decode: Callable[[list[int], bool], str], write: Write):
        self.tokens: list[int] = []
        self._decode, self._write, self._has_prompt = decode, write, False

    def put(self, value: Tensor) -> None:
        """Takes the prompt, at the first call, or the next token."""
        if self._has_prompt:
            self.put_token(value)
        self._has_prompt = True

    def put_token(self, token: Tensor) -> None:
        self.tokens.append(int(token.flatten()[-1]))
        self._write(self._decode(self.tokens, False))

    def end(self) -> None:
        self._write(self._decode(self.tokens, True))


class _Bytes:
    end = pad = None

    def encode(self, prompt: str, *, is_chat: bool) -> list[int]:
        return list(prompt.encode())

    def name(self, token: int) -> str:
        return repr(bytes([min(token, 255)]))

    def stream(self, write: Write) -> _Stream:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(tokens: list[int], is_over: bool) -> str:
            # 0xFF occurs in no UTF-8 text: it marks tokens above 255 of a model with a larger vocabulary.
            return decoder.decode(b"" if is_over else bytes([min(tokens[-1], 0xFF)]), final=is_over)

        return _Stream(decode, write)


class _Tokenizer:
    def __init__(self, path: Path):
        tokenizer = load_tokenizer(path, f"the tokenizer in {path}")
        self._of: Any = tokenizer
        self.end, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    def encode(self, prompt: str, *, is_chat: bool) -> list[int]:
        """The tokens of a prompt, with the special tokens that the tokenizer or its template adds."""
        if not is_chat:
            return [*self._of(prompt)["input_ids"]]
        messages = [{"role": "user", "content": prompt}]
        more = "; or --raw: the prompt is a text to continue"
        text = rendered(self._of, messages, "--prompt", more=more, tokenize=False, add_generation_prompt=True)
        return [*self._of(text, add_special_tokens=False)["input_ids"]]

    def name(self, token: int) -> str:
        return repr(self._of.convert_ids_to_tokens(token))

    def stream(self, write: Write) -> _Stream:
        """What takes the tokens of a text. A piece is decoded with the tokens of the one before it: what a token says may
        depend on its neighbours, such as a blank."""
        before, done = 0, 0  # where the last piece begins and ends

        def decode(tokens: list[int], is_over: bool) -> str:
            nonlocal before, done
            old, text = (
                self._of.decode(part, skip_special_tokens=True) for part in (tokens[before:done], tokens[before:])
            )
            if text.endswith("\ufffd") and not is_over:
                return ""  # some bytes of a character, and more are to come
            before, done = done, len(tokens)
            return text[len(old) :]

        return _Stream(decode, write)
