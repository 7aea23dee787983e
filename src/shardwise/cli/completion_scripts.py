"""The scripts of ``shardwise completion``, with what bash, zsh and fish offer after each word of a command."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.cli.completion import Offer

_OWN = ("--help", "--version")

_BASH = """\
# Completion of shardwise for bash. Made by `shardwise completion bash`: source <(shardwise completion bash)
_shardwise() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="" key="" prefix="" flags="" keys="" words="" valued="" values=""
    COMPREPLY=()
    (( COMP_CWORD > 0 )) && before="${{COMP_WORDS[COMP_CWORD-1]}}"
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    # --key=value is three words where bash breaks words at an =, and one elsewhere.
    if [[ $current == "=" ]]; then
        key=$before current=""
    elif [[ $before == "=" ]]; then
        key=${{COMP_WORDS[COMP_CWORD-2]}}
    elif [[ $current == --*=* ]]; then
        key=${{current%%=*}} prefix="${{current%%=*}}=" current=${{current#*=}}
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    if [[ -n $key ]]; then
        COMPREPLY=($(compgen -P "$prefix" -W "$values" -- "$current"))
    elif [[ " $valued " == *" $before "* ]]; then
        return  # a value that is not known here: the names of files
    elif [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$flags $keys" -- "$current"))
        [[ ${{COMPREPLY[0]-}} == *= ]] && compopt -o nospace 2>/dev/null
    elif (( COMP_CWORD == 2 )); then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    fi
}}
complete -o bashdefault -o default -F _shardwise shardwise
"""

_ZSH = """\
#compdef shardwise
# Completion of shardwise for zsh. Made by `shardwise completion zsh`: source <(shardwise completion zsh)
_shardwise() {{
    local current=${{words[CURRENT]}} before=${{words[CURRENT-1]}}
    if (( CURRENT == 2 )); then
        compadd -- {commands}
        return
    fi
    case ${{words[2]}} in
{cases}
    esac
    _files
}}
if [[ $funcstack[1] == _shardwise ]]; then
    _shardwise "$@"
else
    compdef _shardwise shardwise
fi
"""

_FISH = """\
# Completion of shardwise for fish. Made by `shardwise completion fish`: shardwise completion fish | source
complete -c shardwise -n __fish_use_subcommand -f -a '{own}'
{lines}
"""


def _bash(offers: "Sequence[Offer]") -> str:
    cases = "\n".join(_bash_case(offer) for offer in offers)
    return _BASH.format(commands=" ".join([*(offer.name for offer in offers), *_OWN]), cases=cases)


def _bash_case(offer: "Offer") -> str:
    lines = [
        f"        {offer.name})",
        f'            flags="{" ".join(offer.flags)}"',
        f'            keys="{" ".join(f"{key}=" for key in offer.keys)}"',
        f'            words="{" ".join(offer.words)}"',
        f'            valued="{" ".join(offer.valued)}"',
    ]
    if alike := _alike(offer.keys):
        lines.append('            case "$key" in')
        lines += [f'                {"|".join(keys)}) values="{" ".join(values)}" ;;' for values, keys in alike.items()]
        lines.append("            esac")
    return "\n".join([*lines, "            ;;"])


def _alike(keys: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """Values -> the keys that can have them and no others."""
    found: dict[tuple[str, ...], list[str]] = {}
    for key, values in keys.items():
        if values:
            found.setdefault(values, []).append(key)
    return found


def _zsh(offers: "Sequence[Offer]") -> str:
    cases = "\n".join(_zsh_case(offer) for offer in offers)
    return _ZSH.format(commands=" ".join([*(offer.name for offer in offers), *_OWN]), cases=cases)


def _zsh_case(offer: "Offer") -> str:
    lines = [f"        {offer.name})"]
    if offer.words:
        lines.append(f"            (( CURRENT == 3 )) && compadd -- {' '.join(offer.words)}")
    if offer.valued:
        lines.append(f"            case $before in ({'|'.join(offer.valued)}) _files; return ;; esac")
    lines.append("            case $current in")
    lines += [
        f"                ({key}=*) compadd -- {' '.join(f'{key}={value}' for value in values)}; return ;;"
        for key, values in offer.keys.items()
        if values
    ]
    keys = " ".join(f"{key}=" for key in offer.keys)
    return "\n".join(
        [
            *lines,
            "                (--*=*) compset -P '*='; _files; return ;;",
            f"                (-*) compadd -- {' '.join(offer.flags)}{f'; compadd -S {chr(39) * 2} -- {keys}' if keys else ''}; return ;;",
            "            esac",
            "            ;;",
        ]
    )


def _fish(offers: "Sequence[Offer]") -> str:
    return _FISH.format(own=" ".join(_OWN), lines="\n".join(line for offer in offers for line in _fish_lines(offer)))


def _fish_lines(offer: "Offer") -> list[str]:
    here = f"complete -c shardwise -n '__fish_seen_subcommand_from {offer.name}'"
    lines = [f"complete -c shardwise -n __fish_use_subcommand -f -a {offer.name} -d {_fish_quoted(offer.text)}"]
    lines += [
        f"{here} -l {flag[2:]}{' -r' if flag in offer.valued else ''} -d {_fish_quoted(text)}"
        for flag, text in offer.flags.items()
    ]
    lines += [f"{here} -f -a '{' '.join(offer.words)}'"] if offer.words else []
    for key, values in offer.keys.items():
        lines.append(f"{here} -a '{' '.join(f'{key}={value}' for value in values) or f'{key}='}'")
    return lines


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: "Mapping[str, Callable[[Sequence[Offer]], str]]" = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""Shell -> the script for what can follow each command."""
