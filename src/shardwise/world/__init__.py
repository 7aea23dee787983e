"""The ranks of a run: process groups, mesh axes, exchanges, lost ranks, signals and random streams."""

from shardwise.world.agreement import Agreement
from shardwise.world.axis import Axis
from shardwise.world.env import Env, is_distributed, read_env
from shardwise.world.fingerprint import agree_on, described, package_versions
from shardwise.world.init import World, init
from shardwise.world.liveness import Watch
from shardwise.world.rng import (
    GlobalNumbers,
    derive_seed,
    forked_rng,
    forked_streams,
    generators_among,
    is_generator,
    seed_all,
    snapshot,
)
from shardwise.world.watchdog import EXIT_PEER_LOST

__all__ = [
    "EXIT_PEER_LOST", "Agreement", "Axis", "Env", "GlobalNumbers", "Watch", "World", "agree_on", "derive_seed",
    "described", "forked_rng", "forked_streams", "generators_among", "init", "is_distributed", "is_generator",
    "package_versions", "read_env", "seed_all", "snapshot",
]  # fmt: skip
