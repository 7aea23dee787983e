"""Prints the option that loads our plugin in pytest, or nothing if the installed package loads it already."""

from importlib.metadata import entry_points

__all__: list[str] = []

if __name__ == "__main__":
    found = [entry.value for entry in entry_points(group="pytest11")]
    print("" if "shardwise.testing.plugin" in found else "-p shardwise.testing.plugin")
