"""The search for layers whose parts can be cut over ranks: what runs on parts of a copy of the model, and is proved to give the same."""
