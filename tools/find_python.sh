#!/bin/sh
# Print the path of a Python that can run Shardwise; say what to do if there is none.
# 3.11 comes first: it is the oldest that is supported, and the one whose wheels are most often at hand.
for name in python3.11 python3.12 python3.13 python3.14 python3 python; do
    # A launcher may exist without the version behind it (pyenv), so it is run, not only looked for.
    path=$("$name" -c 'import sys; print(sys.executable) if sys.version_info >= (3, 11) else sys.exit(1)' 2>/dev/null) &&
        [ -n "$path" ] && echo "$path" && exit 0
done
{
    echo "No Python 3.11 or newer was found on the PATH."
    echo "  why: Shardwise and PyTorch need it"
    echo "  fix: install one (Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python@3.11),"
    echo "       or name an environment that has Shardwise's dependencies: make test PYTHON=/path/to/python"
} >&2
exit 1
