"""Initial values of parameters: from a recorded constructor that every rank replays, or from rank 0."""
