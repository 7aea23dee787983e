"""Where the values of parameters come from: a recorded constructor that every rank replays, or rank 0."""
