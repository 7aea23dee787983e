"""The layouts between which state has to go, from each to each."""

__all__ = ["LAYOUTS"]

LAYOUTS = {  # name -> (layout, ranks)
    "one": ("dp_shard=1", 1),
    "ddp-2": ("dp_replicate=2", 2),
    "fsdp-2": ("dp_shard=2", 2),
    "fsdp-4": ("dp_shard=4", 4),
    "hsdp": ("dp_replicate=2,dp_shard=2", 4),
}
