"""The private names of torch that Shardwise uses, one file per subject. No other room touches such names."""
