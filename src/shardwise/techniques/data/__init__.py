"""Data parallelism: replicas whose gradients are summed, shards by FSDP2, and the one order in which ranks run units."""
