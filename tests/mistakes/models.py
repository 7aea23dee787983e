"""Models: built, wrapped, changed and called in ways that leave ranks with models of their own, or nothing trained."""
