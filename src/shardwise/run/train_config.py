"""The section ``train`` of the configuration of ``shardwise train``: how long, by which loss, and what is watched. Torch-free."""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from shardwise.config.limits import AboveZero, Count, NotNegative, Positive
from shardwise.config.record import Options, doc
from shardwise.config.target import split_target
from shardwise.errors import ConfigError
from shardwise.run.optim_config import Scaler

MODEL_LOSS = "model"  # train.loss: the loss that the model returns


class Train(Options, frozen=True, kw_only=True):
    """Section ``train``: number of steps, gradient clipping, validation, seed."""

    also_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("proof", "proofs", "proved", "check_proof", "verify", "verification", "compare", "parity"), "prove"
    )

    steps: Annotated[Positive | None, doc("optimizer steps; null: those of epochs, else 500")] = None
    epochs: Annotated[
        NotNegative | None,
        doc("times that all samples are trained on, in place of steps; 0.5: half of them; null: steps says how long"),
    ] = None
    max_grad_norm: Annotated[AboveZero | None, doc("gradients are scaled down to this norm; null: never")] = 1.0
    norm_type: Annotated[AboveZero | Literal["inf"], doc("p of that norm: 2, 1, ...; inf: the largest element")] = 2.0
    clip_grad_value: Annotated[
        AboveZero | None, doc("each element of a gradient is clamped to [-value, value], after the norm; null: never")
    ] = None
    fused: Annotated[
        bool | str,
        doc("the loss is computed where the head is called, and logits are never held; or the name of the head"),
    ] = False
    loss: Annotated[
        str | None,
        doc(
            "pkg.mod:fn, (output, batch) -> sum over the micro-batch, or a mapping of sums; model: the mean that the model returns, as (logits, "
            "loss) or .loss; null: cross entropy of labels"
        ),
    ] = None
    count: Annotated[
        str | None, doc("pkg.mod:fn, batch -> what the loss is divided by; null: the loss's own, else labels not -100")
    ] = None
    forward: Annotated[
        str | None, doc("pkg.mod:fn, (model, batch) -> output; null: the batch's keys that the model's forward names")
    ] = None
    callback: Annotated[
        str | None,
        doc("pkg.mod:fn, called as fn(out) on every rank after every step; True of any rank ends the run; null: none"),
    ] = None
    seed: Annotated[Count, doc("seed of the weights, the order of samples and dropout")] = 0
    eval_every: Annotated[Count, doc("steps between validations; 0: only at the end")] = 100
    on_nonfinite: Annotated[
        Literal["raise", "skip"], doc("a NaN or infinite gradient: raise ends the run, skip leaves out the step")
    ] = "raise"
    scaler: Annotated[Scaler, doc("how the loss is scaled where precision is fp16")] = Scaler()
    tf32: Annotated[
        bool | None, doc("on cuda, products of float32 in TF32; false: in float32; null: as PyTorch is set")
    ] = None
    deterministic: Annotated[
        bool, doc("only kernels that give the same bits each time; an operator without one is an error")
    ] = False
    anomaly: Annotated[bool, doc("autograd's anomaly detection: names the forward of a NaN in backward; slow")] = False
    profile: Annotated[
        int | str | None,
        doc("a step, or FIRST:LAST, the last not included: a trace by torch.profiler, for Perfetto; null: none"),
    ] = None
    profile_ranks: Annotated[Literal["main", "all"], doc("with profile: rank 0 only, or a trace of each rank")] = "main"
    memory_snapshot: Annotated[
        Positive | None, doc("on cuda, the step whose allocations are written, for pytorch.org/memory_viz; null: none")
    ] = None
    prove: Annotated[
        bool, doc("after the last step, three steps are compared with one plain process, float64 on the CPU")
    ] = True
    timeout_s: Annotated[
        AboveZero, doc("seconds a rank waits for the others before it gives up; after 10 it says whom for")
    ] = 600.0

    @property
    def profiled_steps(self) -> range | None:
        if self.profile is None:
            return None
        first, _, last = str(self.profile).partition(":")
        return range(int(first), int(last or int(first) + 1))

    def check(self) -> None:
        if self.epochs is not None and self.steps is not None:
            raise ConfigError(
                f"train.epochs={self.epochs:g} with train.steps={self.steps}",
                why="each of them says how long the run is",
                fix="remove one; on the command line, over a file that has it: --train.steps=null or --train.epochs=null",
            )
        for key in ("loss", "count", "forward", "callback"):
            target = getattr(self, key)
            if target is not None and (key, target) != ("loss", MODEL_LOSS):
                more = "; or model, for the loss that the model returns" if key == "loss" else ""
                split_target(target, f"train.{key}={target!r}", more)
        if self.fused and self.loss is not None:
            raise ConfigError(
                f"train.fused={self.fused!r} with train.loss={self.loss!r}",
                why="the next-token loss is computed in place of the logits, which a loss of your own would be given",
                fix="remove one of them",
            )
        if self.profile is None:
            if self.profile_ranks != "main":
                raise ConfigError(
                    f"train.profile_ranks={self.profile_ranks!r} without train.profile",
                    why="nothing is profiled, so it would have no effect",
                    fix="say which steps: train.profile=10:13; or remove profile_ranks",
                )
        elif not re.fullmatch(r"[1-9]\d{0,9}(:\d{1,10})?", str(self.profile)) or not self.profiled_steps:
            raise ConfigError(
                f"train.profile={self.profile!r}",
                why="it is neither a step, from 1, nor FIRST:LAST, a first one and a later one, which is not included",
                fix="write 10:13 for steps 10, 11 and 12",
            )
