"""``shardwise generate DIR --prompt TEXT``: continues a text, or answers a message, with the model in a directory. What can be
checked without the model is checked before torch is imported."""

import argparse
import importlib.util
import sys
from pathlib import Path

from shardwise.cli.arguments import Parser
from shardwise.errors import ConfigError
from shardwise.launch.imports import import_frozen


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", help="a Hugging Face model directory, or the folder of a run: runs/latest"
    )
    parser.add_argument(
        "--adapter", metavar="DIR", help="LoRA adapters (PEFT's files) to merge into the model before it generates"
    )
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="what the model continues or answers; -: stdin")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a user's message, put into the chat template (so by default where the directory has one)",
    )
    parser.add_argument("--raw", action="store_true", help="the prompt is a text to continue, without the template")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=100, help="tokens at most (100)")
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="0: always the most likely token; above: drawn from softmax(logits / T) (0)",
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of what is drawn (0)")
    parser.add_argument(
        "--device", metavar="D", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is one"
    )
    parser.add_argument("--dtype", metavar="D", help="compute in it: fp32, bf16, ... (as the weights are stored)")
    parser.usage = "shardwise generate DIR --prompt TEXT [--chat | --raw] [--max-tokens N] [--temperature T] ..."


def more_help() -> str:
    """Help text: examples."""
    return (
        "examples:\n"
        '  shardwise generate runs/chat-tuned --prompt "What does a cow do?"\n'
        '  shardwise generate runs/latest --prompt "The import statement" --temperature 0.6'
    )


def run(args: argparse.Namespace) -> int:
    from shardwise.config.dtype_words import DTYPE_WORDS
    from shardwise.config.suggest import listing
    from shardwise.run.model_folder import find_model, has_template

    _check_numbers(args)
    if args.dtype is not None and args.dtype not in DTYPE_WORDS:
        raise ConfigError(
            f"--dtype {args.dtype}", why="there is no such dtype", fix=f"use one of {listing(DTYPE_WORDS)}"
        )
    found = find_model(args.folder)
    if args.chat and not has_template(found.tokenizer):
        raise ConfigError(
            f"--chat for {args.folder}",
            why="its tokenizer has no chat template, so nothing says how a message becomes a text"
            if found.tokenizer != "bytes"
            else "its tokens are the bytes of a text: it was trained without a tokenizer, and knows no messages",
            fix="leave --chat out: the model continues the prompt",
        )
    if args.adapter is not None and not found.is_hf:
        raise ConfigError(
            f"--adapter {args.adapter} for {args.folder}",
            why="it has no config.json: adapters are merged into the model of a Hugging Face directory",
            fix="leave it out, or give the directory that the adapter was trained beside",
        )
    if (found.is_hf or found.tokenizer != "bytes") and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            args.folder, why="it is opened by transformers, which is not installed", fix="pip install 'shardwise[hf]'"
        )
    prompt = _text_of(args.prompt)
    engine = import_frozen("shardwise.run.generation")
    done = engine.generate_text(
        found,
        prompt,
        is_chat=args.chat or (has_template(found.tokenizer) and not args.raw),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        device=args.device,
        dtype=DTYPE_WORDS.get(args.dtype or ""),
        adapter=Path(args.adapter) if args.adapter else None,
        write=lambda text: print(text, end="", flush=True),
    )
    print(flush=True)
    print(f"({done})", file=sys.stderr)
    return 0


def _text_of(prompt: str) -> str:
    """The prompt; ``-``: what is read from standard input."""
    if prompt == "-" and sys.stdin is None:
        raise ConfigError("--prompt -", why="standard input is closed", fix="give the text: --prompt TEXT")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError as error:
        raise ConfigError(
            f"--prompt {prompt!a}",
            why=f"it is not UTF-8: {error.reason}",  # type: ignore[attr-defined]
            fix="give it in UTF-8: iconv -f latin1 -t utf-8 FILE | shardwise generate DIR --prompt -",
        ) from error
    return text


def _check_numbers(args: argparse.Namespace) -> None:
    if args.chat and args.raw:
        raise ConfigError(
            "--chat with --raw", why="one uses the chat template, the other does not", fix="leave one out"
        )
    for name, value, is_right, fix in (
        ("--max-tokens", args.max_tokens, args.max_tokens >= 1, "a number from 1"),
        (
            "--temperature",
            args.temperature,
            0 <= args.temperature < float("inf"),
            "0, or a number above it, such as 0.7",
        ),
        ("--seed", args.seed, 0 <= args.seed < 1 << 63, "a number from 0"),
    ):
        if not is_right:
            raise ConfigError(f"{name} {value}", why="it is out of range", fix=f"give {fix}")
