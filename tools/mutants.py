"""Mutation testing: breaks the library in one small way at a time, and reports which of the breaks the tests detect.

    python tools/mutants.py --check          # does every snippet still exist, once? (seconds, without torch)
    python tools/mutants.py --list           # names, and what each would do to a user
    python tools/mutants.py --only clip-scaled-gradients
    python tools/mutants.py --write          # all of them, into docs/mutants.md (most of an hour on 2 cores)

A mutant is found by its text and not by its path, so that files and names may move. It is applied in a copy of the tree
as git sees it, with uncommitted changes, and the tests named in it run there. It counts as killed if a test fails, and
also if it hangs for five minutes; a missing name or a failing import is not a kill but a badly written mutant.
"""

import argparse
import ast
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

__all__ = ["EQUIVALENT", "MUTANTS", "Mutant", "Outcome", "main", "misplaced", "room_of", "sources"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/shardwise")
PAGE = "docs/mutants.md"
LIMIT_S = 300.0


@dataclass(frozen=True)
class Mutant:
    """One break.

    Attributes:
        name: by which it is asked for.
        before: text that occurs once in the whole package.
        after: what is put in its place.
        tests: arguments of pytest, as a shell would read them: what is to notice it, as little as does.
        why: what it would do to a user, who is told nothing.
    """

    name: str
    before: str
    after: str
    tests: str
    why: str


_SELF = "        "  # the indentation of a method's first line

MUTANTS: tuple[Mutant, ...] = (
    # ---- dialects: configurations of other systems -------------------------------------------------------------------
    Mutant(
        "import-batch-of-one-rank",
        "whole = micro * (steps or 1) * rows if whole is None else whole",
        "whole = micro * (steps or 1) if whole is None else whole",
        "tests/dialects/test_import.py -k samples_of_a_step",
        "an imported batch is that of one rank: the learning rate is too high for it",
    ),
    Mutant(
        "import-batch-without-accumulation",
        "whole = micro * (steps or 1) * rows if whole is None else whole",
        "whole = micro * rows if whole is None else whole",
        "tests/dialects/test_import.py -k samples_of_a_step",
        "accumulation of another system is lost",
    ),
    Mutant(
        "import-batch-of-tensor-parallel-ranks",
        "        ranks.rows = ranks.total // (tp * cp)",
        "        ranks.rows = ranks.total // cp",
        "tests/dialects/test_import.py -k samples_of_a_step",
        "ranks of tensor parallelism are counted as if they read other samples",
    ),
    Mutant(
        "import-batch-of-context-parallel-ranks",
        "        ranks.rows = ranks.total // (tp * cp)",
        "        ranks.rows = ranks.total // tp",
        "tests/dialects/test_import.py -k a_file_means",
        "ranks of context parallelism are counted as if they read other samples",
    ),
    Mutant(
        "import-what-decides-a-run-is-ours",
        "            facts.put(key, UNWRITTEN)",
        "            pass",
        "tests/dialects/test_import.py -k has_to_be_written",
        "a run has our default of 128 tokens, 16 samples or 500 steps where another system's file says nothing",
    ),
    Mutant(
        "what-a-file-leaves-open-is-taken",
        "    _refuse_unwritten(layer)\n    origins: dict[str, str] = {}\n    config",
        "    origins: dict[str, str] = {}\n    config",
        "tests/dialects/test_import.py -k has_to_be_written",
        "what has to be written in a run file is not named",
    ),
    Mutant(
        "import-names-compared-without-end",
        "is_compared=self.num_compared <= _MOST_COMPARED",
        "is_compared=True",
        "tests/dialects/test_import.py -k without_end",
        "a file of 5,000 keys that nobody has takes 11 s to be refused",
    ),
    Mutant(
        "import-budget-of-activations-lost",
        'if (budget := facts.get("parallel.compile.activation_memory_budget")) is not None:',
        "if (budget := None) is not None:",
        "tests/dialects/test_meanings.py -k mean_together",
        "a budget of activations is said to be kept, and compile keeps them all",
    ),
    Mutant(
        "import-batch-not-split",
        "        micro //= rows",
        "        pass",
        "tests/dialects/test_meanings.py -k mean_together",
        "a batch that is split over ranks there is that of each rank here",
    ),
    Mutant(
        "import-context-of-tokens-lost",
        "return micro // length, whole // length",
        "return micro, whole // length",
        "tests/dialects/test_meanings.py -k mean_together",
        "tokens of a micro-batch are taken for samples",
    ),
    Mutant(
        "import-batch-of-a-script-refused",
        'if name in facts.table.words("by_script"):',
        "if False:",
        "tests/dialects/test_meanings.py -k script_fills_in",
        "a plugin of accelerate with DeepSpeed's usual file is refused, with a fix that is none",
    ),
    Mutant(
        "import-product-not-checked",
        "    if ranks.total % known if is_open else known != ranks.total:",
        "    if False:",
        "tests/dialects/test_import.py -k degrees_that_are_not",
        "degrees that are not the ranks are imported, and another layout is trained",
    ),
    Mutant(
        "import-defaults-not-written",
        "    for section, row in table.defaults:\n        key = row.key\n",
        "    for section, row in []:\n        key = row.key\n",
        "tests/dialects/test_import.py -k defaults_there",
        "what a file does not say is ours and not theirs: other betas, no clipping",
    ),
    Mutant(
        "import-validation-default",
        '            facts.put("data.val_fraction", 0)',
        "            pass",
        "tests/dialects/test_import.py -k defaults_there",
        "a tenth of the data is not trained on",
    ),
    Mutant(
        "import-contradiction-not-seen",
        "        if old is not None and old.note.is_given and old.value != value and not is_later:",
        "        if False:",
        "tests/dialects/test_import.py -k contradict",
        "of two keys that say different things one counts, and nothing is said",
    ),
    Mutant(
        "import-inner-section-half-counts",
        "        del facts.known[fact]\n        if old.note.is_given:",
        "        if False:",
        "tests/dialects/test_import.py -k section_of_the_file_within",
        "defaults of the outer file count for the optimizer of the inner one",
    ),
    Mutant(
        "import-unused-key-kept",
        '            if note.is_given and note.is_fact and not note.is_used and note.verdict in ("kept", "changed"):',
        "            if False:",
        "tests/dialects/test_import.py -k another_version",
        "a key that nothing reads is said to be kept",
    ),
    Mutant(
        "import-unknown-key-dropped",
        "                facts.refuse_unknown(shown, written, table)\n        elif key in given:",
        "                pass\n        elif key in given:",
        "tests/dialects/test_values.py -k 'misspelt and not every'",
        "a misspelt key is left out without a word",
    ),
    Mutant(
        "import-resolver-taken",
        '    if is_given and "${" in str(value) and verdict != "dropped":',
        "    if False:",
        "tests/dialects/test_import.py -k resolvers_are_refused",
        "the text of a variable is taken for its value",
    ),
    Mutant(
        "import-variable-not-known",
        "    return [name for name in environ if name.startswith(_VARIABLES) and name not in known]",
        "    return []",
        "tests/dialects/test_import.py -k variable_that_is_not_known",
        "a misspelt variable of the environment is not looked at",
    ),
    Mutant(
        "import-none-hides-data",
        " and not (is_later and old.value is None):",
        ":",
        "tests/dialects/test_meanings.py -k default_of_none",
        "a default of none that is written out hides where the data is",
    ),
    Mutant(
        "import-precision-of-two-files",
        "        elif word not in (None, meant) and facts.is_given(by):",
        "        elif False:",
        "tests/dialects/test_meanings.py -k another_precision",
        "of two files that say another precision one counts, and nothing is said",
    ),
    Mutant(
        "import-shorter-run-not-said",
        "    if is_shorter and epochs and epochs > 0:",
        "    if False:",
        "tests/dialects/test_meanings.py -k earlier_of_steps",
        "a run that ends with its epochs there goes on",
    ),
    Mutant(
        "import-run-of-no-epoch",
        "    is_none = isinstance(epochs, int | float) and epochs <= 0 and not is_counted",
        "    is_none = False",
        "tests/dialects/test_meanings.py -k no_epoch",
        "a run of no epoch has our default of steps",
    ),
    Mutant(
        "import-named-devices-not-counted",
        '    if isinstance(own, str) and "," in own:',
        "    if False:",
        "tests/dialects/test_meanings.py -k devices_that_are_named",
        "ranks that are named are not counted",
    ),
    Mutant(
        "import-variables-without-their-switch",
        '            if switch is not None and environ.get(switch, "").strip().lower() not in ("true", "1"):',
        "            if False:",
        "tests/dialects/test_meanings.py -k under_their_switch",
        "variables that nothing reads there cut the model",
    ),
    Mutant(
        "import-overwritten-rate-kept",
        "            self._end_of(key, names)",
        "            pass",
        "tests/dialects/test_meanings.py -k scheduler_overwrites",
        "a rate that does not count is said to be kept",
    ),
    Mutant(
        "import-decay-of-a-fused-class",
        'str(said).lower().rpartition(".")[2], 0.0)',
        "str(name), 0.0)",
        "tests/dialects/test_meanings.py -k fused_class",
        "decay that is not there",
    ),
    Mutant(
        "import-weights-of-another-format",
        "        model = None\n",
        "        pass\n",
        "tests/dialects/test_meanings.py -k format_that_is_not_read",
        "a directory in another format is taken for the model",
    ),
    Mutant(
        "import-part-of-a-run-rounded-down",
        "every = UNWRITTEN if steps is None else math.ceil(every * steps)",
        "every = UNWRITTEN if steps is None else int(every * steps)",
        "tests/dialects/test_meanings.py -k mean_together",
        "validation and checkpoints at other steps than there",
    ),
    Mutant(
        "import-part-of-an-unknown-run",
        "every = UNWRITTEN if steps is None else math",
        "every = 10 if steps is None else math",
        "tests/dialects/test_meanings.py -k mean_together",
        "a default of ours stands where the length of the run is not known",
    ),
    Mutant(
        "import-accumulation-of-the-launcher",
        '        if is_beside and old is not None and name in other.table.words("alone"):',
        "        if False:",
        "tests/dialects/test_import.py -k two_files",
        "the batch is as many times larger as a launcher says, which the Trainer does not read",
    ),
    Mutant(
        "import-clip-that-is-filled-in",
        '        if name in facts.known and facts.known[name].value == "auto":',
        "        if False:",
        "tests/dialects/test_meanings.py -k mean_together",
        "gradients are not clipped where they are there",
    ),
    Mutant(
        "import-values-that-have-to-match",
        '        if value not in ("auto", None, old.value):',
        "        if False:",
        "tests/dialects/test_meanings.py -k nothing_together",
        "one of two rates counts, where the source refuses both",
    ),
    Mutant(
        "import-rate-under-floors-overridden",
        "    if _has_rates(facts, args):",
        "    if False:",
        "tests/cli/test_import_config.py -k mistake",
        "a floor that is a rate moves with the highest rate",
    ),
    Mutant(
        "import-skips-without-bf16",
        '    if is_on and "bf16" in str(',
        '    if "" in str(',
        "tests/dialects/test_meanings.py -k mean_together",
        "steps that are not finite are skipped, where they end the run",
    ),
    Mutant(
        "import-keys-without-effect",
        "filter(facts.is_given, _UNUSED.get(str(name), ())):",
        "[]:",
        "tests/dialects/test_meanings.py -k without_effect",
        "an argument that no optimizer gets is said to be kept",
    ),
    Mutant(
        "import-arguments-of-plain-optimizers",
        '    facts.stop_if(own, [*own, "optimizer"][0], text)',
        "",
        "tests/dialects/test_meanings.py -k nothing_together",
        "arguments of torch's Adafactor are lost",
    ),
    Mutant(
        "import-sentence-of-other-values",
        '        if say == self.says.get("*") and',
        "        if False and",
        "tests/dialects/test_meanings.py -k without_effect",
        "what is said of other values is said of this one",
    ),
    Mutant(
        "import-parts-left-to-our-defaults",
        "    _leave_open(facts)\n",
        "    if is_run:\n        _leave_open(facts)\n",
        "tests/dialects/test_import.py -k a_file_means",
        "a run of a file that says no rate takes ours",
    ),
    # ---- dialects --------------------------------------------------------------------------------------------------
    Mutant(
        "curve-of-another-length-ignored",
        'steps = args.pop("steps", num_steps)',
        'steps = num_steps if args.pop("steps", 0) else num_steps',
        "tests/run/test_optim.py -k curve_of_the_users_own",
        "a curve that another system stretches over other steps than the run's falls too early or too late",
    ),
    Mutant(
        "negative-rate-of-a-curve",
        "not 0 <= part < math.inf",
        "not part < math.inf",
        "tests/run/test_optim.py -k gives_no_rate",
        "a curve that goes below zero makes the loss larger",
    ),
    Mutant(
        "curve-without-its-late-first-step",
        "at, warmup = done - 1, max(2, warmup)",
        "at, warmup = done, max(2, warmup)",
        "tests/dialects/test_curves.py -k systems_code",
        "an imported DeepSpeed curve is a step ahead of DeepSpeed's",
    ),
    Mutant(
        "curve-without-the-virtual-last-step",
        "(done - (steps - decay)) / max(1, decay)",
        "(done + 1 - (steps - decay)) / max(1, decay)",
        "tests/dialects/test_curves.py -k systems_code",
        "an imported torchtitan curve falls a step too early",
    ),
    Mutant(
        "rise-of-an-imported-curve-a-step-ahead",
        "return _rise(kind, done / max(1, warmup), floor, warmup_type)",
        "return _rise(kind, (done + 1) / max(1, warmup), floor, warmup_type)",
        "tests/dialects/test_curves.py -k curves_of_transformers",
        "--exact does not keep the Trainer's learning rates",
    ),
    Mutant(
        "imported-adapters-in-low-precision",
        'or head.get("adapters") != "fp32":',
        "or True:",
        "tests/dialects/test_adapters.py -k float32",
        "adapters of an imported run are stored in bfloat16, where PEFT has float32, and small updates are lost",
    ),
    Mutant(
        "imported-weights-in-low-precision",
        'if stored in (None, "fp32") or not is_raised:',
        "if True:",
        "tests/dialects/test_meanings.py -k loaded_in_less",
        "weights that FSDP and ZeRO raise to float32 there are trained in bfloat16, and small updates are lost",
    ),
    Mutant(
        "imported-weights-of-a-loop-that-raises-none",
        'not facts.has("store") and not stays)',
        'not facts.has("store"))',
        "tests/dialects/test_meanings.py -k loaded_in_less",
        "weights that a loop of its own trains in bfloat16 there are float32",
    ),
    Mutant(
        "imported-stage-0-as-zero",
        '_engine(facts) == "zero" and bool(word or int(facts.take("zero", 3)))',
        '_engine(facts) == "zero"',
        "tests/dialects/test_meanings.py -k loaded_in_less",
        "stage 0, which has no copy in float32, is imported as if it had",
    ),
    Mutant(
        "imported-adapters-of-4-bits",
        'if facts.take("in_4_bits") is True and not is_raised else None',
        "if False else None",
        "tests/dialects/test_adapters.py -k weights_in_4_bits",
        "adapters that are bfloat16 there are float32, and nothing is said",
    ),
    Mutant(
        "imported-base-of-low-adapters-in-float32",
        '{"compute": stored} if facts.has("adapter") else {}',
        "{}",
        "tests/dialects/test_adapters.py -k float32_beside",
        "frozen weights beside adapters in bfloat16 stay and compute in float32",
    ),
    Mutant(
        "imported-precision-that-is-off-there",
        "is_off = ranks.tp > 1",
        "is_off = ranks.tp < 1",
        "tests/dialects/test_meanings.py -k switches_off",
        "tensor parallelism alone, which computes in float32 there, computes in bfloat16",
    ),
    Mutant(
        "imported-shards-over-copies",
        'ranks.rows // int(degrees.get("dp_replicate", 1))',
        "ranks.rows",
        "tests/dialects/test_meanings.py -k switches_off",
        "copies count as shards of a parameter",
    ),
    Mutant(
        "imported-rise-that-is-filled-in",
        "rise, ratio = _rise(facts, steps)  # as",
        "rise, ratio = 0, None  # as",
        "tests/dialects/test_meanings.py -k run_fills_in",
        "a scheduler that is filled in begins at the highest rate",
    ),
    Mutant(
        "imported-part-that-fills-in-a-rise",
        'if fact == "warmup_ratio" and "warmup" in other.known',
        "if False",
        "tests/dialects/test_meanings.py -k run_fills_in",
        "a warmup_ratio beside a scheduler that takes it is dropped",
    ),
    Mutant(
        "imported-rise-of-a-run-in-epochs",
        "rise, ratio = 0, 0.1",
        "rise, ratio = 0, None",
        "tests/dialects/test_meanings.py -k rise_by_default",
        "a run in epochs has no rise, which by default there is a tenth of it",
    ),
    Mutant(
        "imported-rise-without-its-most",
        "min(1000, int(warmup_ratio * steps))",
        "int(warmup_ratio * steps)",
        "tests/dialects/test_curves.py -k rounded_as_there",
        "a rise by default is longer than there in a long run",
    ),
    Mutant(
        "imported-precision-of-the-launcher",
        'by == "mp" and name == "mp_bf16_else"',
        "False",
        "tests/dialects/test_meanings.py -k its_launcher",
        "mixed precision of the launcher counts, and not the run's own by default",
    ),
    Mutant(
        "fp4-imported-as-nf4",
        'if facts.take("code_4bit", "nf4") != "nf4":',
        "if False:",
        "tests/dialects/test_adapters.py -k something_else",
        "weights that another system stores in fp4, its default, are stored in another code",
    ),
    Mutant(
        "two-axes-of-positions-imported-as-one",
        "if cp > 1 and by_heads > 1:",
        "if False:",
        "tests/dialects/test_adapters.py -k something_else",
        "of cp_size and sp_size one is lost",
    ),
    Mutant(
        "imported-alpha-left-out",
        'facts.pass_on("parallel.lora.alpha", "adapter_alpha", float)',
        "pass",
        "tests/dialects/test_adapters.py -k those_of_the_source",
        "imported adapters have another scale than there: ours is 2, PEFT's 1",
    ),
    Mutant(
        "imported-head-without-an-adapter",
        'for name in ("adapter_also", "adapter_head"):',
        'for name in ("adapter_also",):',
        "tests/dialects/test_adapters.py -k those_of_the_source",
        "the head, which has an adapter in torchtune, stays frozen",
    ),
    Mutant(
        "imported-section-although-it-is-off",
        'if not is_on and word != "auto":',
        "if False:",
        "tests/dialects/test_meaning.py -k switched_off",
        "ZeRO-3 and a clip of a section that the other system does not read are imported from it",
    ),
    Mutant(
        "imported-keys-in-the-order-of-the-file",
        "    entries.sort(key=lambda one: (bool(",
        "    [].sort(key=lambda one: (bool(",
        "tests/dialects/test_meaning.py -k wherever_the_decay",
        "weight decay of an imported run is on matrices only or on all, by the order of keys",
    ),
    Mutant(
        "imported-default-that-nothing-settles-left-unsaid",
        'note.is_used = verdict == "changed" and not actions',
        "note.is_used = False",
        "tests/dialects/test_meaning.py -k trained_on_by_default",
        "that a whole conversation is trained on there is not said where it is the default",
    ),
    # ---- world -----------------------------------------------------------------------------------------------------
    Mutant(
        "two-gloo-threads",
        "options._timeout, options._threads = timeout, 1",
        "options._timeout, options._threads = timeout, 2",
        "tests/world/test_gloo_threads.py",
        "torch's two threads of a group write into freed memory",
    ),
    Mutant(
        "network-interface-ignored",
        "if len(interfaces) > 1",
        "if False",
        "tests/world/test_gloo_threads.py",
        "ranks meet on another network than the one in GLOO_SOCKET_IFNAME",
    ),
    Mutant(
        "gloo-device-for-each-group",
        "_gloo_devices(os.getpid(), os.environ",
        "_gloo_devices.__wrapped__(os.getpid(), os.environ",
        "tests/world/test_gloo_threads.py -k does_not_take",
        "each group looks the host's name up, and has a thread and a socket of its own",
    ),
    Mutant(
        "gloo-thread-takes-the-core",
        "            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\n",
        "            pass\n",
        "tests/world/test_gloo_threads.py -k does_not_take",
        "gloo's thread takes the core of the thread whose lock it waits for",
    ),
    Mutant(
        "rank-left-in-another-scheduling-policy",
        "                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))",
        "                pass",
        "tests/world/test_gloo_threads.py -k does_not_take",
        "a rank's own thread and its children wait longer for a core than those of other programs",
    ),
    Mutant(
        "children-from-last-to-first",
        "        waiting += reversed(children)",
        "        waiting += children",
        "tests/model/test_names.py",
        "parameters are sent and named in another order than modules have",
    ),
    Mutant(
        "equality-of-one-part",
        "return size * aa == a * a and",
        "return size * aa == a * a or",
        "tests/world/test_world.py -k exchange_sums_and_tells_equality",
        "ranks that bring different numbers are taken for equal",
    ),
    Mutant(
        "slot-of-rank-0",
        "found[self.rank] = value",
        "found[0] = value",
        "tests/step/test_optim_clip.py -k norm_and_clipped_gradients",
        "the largest gradient element of several ranks is their sum",
    ),
    Mutant(
        "models-never-compared",
        "None if agreement.all_same(total) else _difference(agreement, own)",
        "None",
        "tests/world/test_world.py -k 'ranks_with_different_models or ranks_started_differently'",
        "ranks that were started differently, or built different models, train on",
    ),
    Mutant(
        "mean-of-buffers-not-divided",
        "flat /= self.size",
        "flat /= 1",
        "tests/step/test_exchange.py",
        "running statistics that should be a mean over ranks are a sum",
    ),
    Mutant(
        "buffers-of-the-last-rank",
        "return dist.broadcast(flat, src=0,",
        "return dist.broadcast(flat, src=self.size - 1,",
        "tests/step/test_exchange.py tests/step/test_silent.py -k buffer",
        "buffers of rank 0 are overwritten by those of the last rank",
    ),
    Mutant(
        "gathered-with-its-padding",
        "torch.cat([part.narrow(dim, 0, size)",
        "torch.cat([part.narrow(dim, 0, longest)",
        "tests/world/test_world.py -k axes_of_four_ranks",
        "a gather of unequal tensors has rows of zeros between them",
    ),
    Mutant(
        "every-rank-draws-the-same",
        'own = _seeded = seed if rank == 0 else derive_seed(seed, "rank", rank)',
        "own = _seeded = seed",
        "tests/step/test_streams.py -k code_of_ones_own",
        "code of the user's own draws the same random numbers on every rank",
    ),
    Mutant(
        "torch-stream-not-put-back",
        "torch.set_rng_state(before)",
        "pass",
        "tests/step/test_streams.py",
        "a forward leaves torch's random numbers elsewhere than before it",
    ),
    Mutant(
        "generators-share-a-stream",
        "stack.enter_context(_forked(generator, derive_seed(seed, name)))",
        "stack.enter_context(_forked(generator, seed))",
        "tests/step/test_streams.py",
        "two generators that modules keep draw the same numbers",
    ),
    Mutant(
        "augmentation-of-each-rank",
        "return forked_streams(seed, None, self._generators)",
        "return forked_generators(seed, self._generators)",
        "tests/data/test_workers.py -k random_numbers",
        "random augmentation is another for each number of ranks, workers, and after a resume",
    ),
    Mutant(
        "crossed-by-one-old-beat",
        "is_anew = all(beat.has_left or",
        "is_anew = any(beat.has_left or",
        "tests/world/test_connections.py -k only_if_all_say_so_anew",
        "ranks that are only late are said to wait for each other for ever",
    ),
    Mutant(
        "those-who-wait-are-blamed",
        "for rank, beat in beats.items() if beat.waits != what}",
        "for rank, beat in beats.items() if beat.waits == what}",
        "tests/world/test_connections.py -k who_is_missing",
        "the ranks that wait as they should are named as the ones that did not come",
    ),
    Mutant(
        "failure-without-a-word",
        "self.watch.failed(error)",
        "pass",
        "tests/world/test_lost_ranks.py -k 'out_of_memory or word_of'",
        "a rank that fails leaves no word, and the others name something else as the cause",
    ),
    Mutant(
        "closed-world-still-answers",
        "if not self.is_open:",
        "if self.is_open is None:",
        "tests/test_bad_input.py -k world_was_closed",
        "calls in a world that was closed hang or answer by themselves",
    ),
    # ---- techniques: shards ------------------------------------------------------------------------------------------
    Mutant(
        "shards-averaged",
        "group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True",
        "group.force_sum_reduction_for_comms = True",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[reference-fsdp-4-acc3-clip-default]'",
        "gradients of ranks are averaged, not summed",
    ),
    Mutant(
        "unused-parameters-not-reduced",
        "                _fill_unused(group)\n",
        "",
        "tests/techniques/data/test_traps_sharding.py -k 'none_zero or experts'",
        "ranks that used other parameters exchange gradients of different ones",
    ),
    Mutant(
        "always-resharded",
        "reshard_after_forward=is_over_some or unit.reshard,",
        "reshard_after_forward=True,",
        "'tests/techniques/test_knobs.py::test_a_knob_shows[0-2]'",
        "reshard_after_forward=False and reshard_every have no effect",
    ),
    Mutant(
        "memory-pinned-anyway",
        'CPUOffloadPolicy(pin_memory=said.pin_memory and world.device.type != "cpu")',
        'CPUOffloadPolicy(pin_memory=world.device.type != "cpu")',
        "tests/techniques/test_knobs.py -k accelerator",
        "pin_memory=False has no effect, and a host runs out of page-locked memory",
    ),
    Mutant(
        "reduced-as-computed",
        "reduce_dtype=dtype_of(group.reduce) if group.reduce else None,",
        "reduce_dtype=None,",
        "tests/techniques/precision/test_precision.py -k gradients_are_summed_in_fp32",
        "gradients are summed in bfloat16 though float32 was asked for",
    ),
    Mutant(
        "recurrent-weights-flattened",
        "    leave_unflattened(module)\n    for name",
        "    for name",
        "tests/techniques/data/test_own_loops.py -k unflattened",
        "on an accelerator recurrent layers compute with the weights of the first step for ever",
    ),
    Mutant(
        "used-not-noted",
        "self._used[positions] = 1",
        "self._used[positions] = 0",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[reference-fsdp-4-acc3-clip-default]'",
        "the gradients of sharded parameters are dropped before the step",
    ),
    Mutant(
        "sync-in-every-micro-batch",
        "        reduces = is_last or bool(each)\n",
        "        reduces = True\n",
        "tests/techniques/data/test_traps_sharding.py -k no_traffic_while_gradients_accumulate",
        "gradients travel at every micro-batch, and accumulation costs as much as steps",
    ),
    Mutant(
        "sync-option-ignored",
        "self._set_reduction(is_last, each=self._sync_each)",
        "self._set_reduction(is_last, each=False)",
        "'tests/techniques/test_knobs.py::test_a_knob_shows[6-2]'",
        "sync_every_microbatch has no effect, and whole gradients stay in memory",
    ),
    Mutant(
        "used-of-the-last-window",
        "        self._used.zero_()\n        if not self._taken",
        "        if not self._taken",
        "tests/techniques/data/test_unused.py",
        "a parameter that is not used any more gets zeros, and decays by the optimizer's weight decay",
    ),
    Mutant(
        "norm-counts-replicas",
        "                if ranks[least] == self.world.rank:",
        "                if self.world.rank in ranks:",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[reference-hsdp-2x2-acc1-clip-blocks]'",
        "the gradient norm counts each replica's copy, so gradients are clipped too much",
    ),
    Mutant(
        "norm-counted-by-one-rank",
        "least = so_far.index(min(so_far))",
        "least = 0",
        "tests/step/test_optim_clip.py -k counted_on_one",
        "the norm of replicas is measured by one rank while the others wait",
    ),
    Mutant(
        "norm-of-frozen-parameters-shared-out",
        "math.prod(piece.sizes) if name in trained else 0",
        "math.prod(piece.sizes)",
        "tests/step/test_optim_clip.py -k frozen_ones_are_no_work",
        "a rank that counts a large frozen parameter counts nothing else, and the others wait for each other's work",
    ),
    # ---- techniques: units and their order ---------------------------------------------------------------------------
    Mutant(
        "gathered-before-the-step",
        "if not unit.is_free and number not in self.kept:\n                unit.release()\n        self.earlier = set(self.kept)",
        "if not unit.is_free and number not in self.kept:\n                pass\n        self.earlier = set(self.kept)",
        "tests/techniques/data/test_identity.py -k kept_of_a_models_parameters",
        "a forward computes with weights from before the last step",
    ),
    Mutant(
        "no-prefetch-in-forward",
        "self._prefetch(self.ahead.get(number, []), backward=False)",
        "self._prefetch([], backward=False)",
        "'tests/techniques/test_knobs.py::test_a_knob_shows[9-2]'",
        "Prefetch(forward=1) has no effect",
    ),
    Mutant(
        "no-prefetch-in-backward",
        "self.behind.get(number, [] if upcoming is None else [upcoming])",
        "self.behind.get(number, [])",
        "'tests/techniques/test_knobs.py::test_a_knob_shows[10-2]'",
        "backward gathers no unit ahead, and waits for each",
    ),
    Mutant(
        "skipped-units-not-summed",
        "for number in reversed(range(len(self.units.inner))):",
        "for number in ():",
        "tests/techniques/data/test_skipping.py tests/techniques/data/test_own_loops.py -k 'ranks_skip or last_micro_batch'",
        "gradients of earlier micro-batches are lost where the last one skipped a block",
    ),
    Mutant(
        "written-before-backward",
        _SELF + "    refuse_written(unit, version)\n",
        "",
        "tests/techniques/data/test_identity.py tests/techniques/data/test_own_loops.py -k 'before_its or between_a_forward'",
        "a backward after an optimizer step mixes the values of before and after it",
    ),
    Mutant(
        "order-without-what-no-rank-ran",
        "self._known[situation] = completed(taken, reference)",
        "self._known[situation] = taken",
        "tests/techniques/data/test_skipping.py -k ranks_skip",
        "a block that no rank ran in the first step may be run by one rank alone later",
    ),
    Mutant(
        "order-left-and-kept",
        "if walk.has_left:\n            self._known.pop(situation, None)",
        "if walk.has_left:\n            pass",
        "tests/techniques/data/test_skipping.py -k agree_on_it_once",
        "ranks that have left an order go back to it at once, and agree anew in every step",
    ),
    # ---- techniques: replicas ----------------------------------------------------------------------------------------
    Mutant(
        "late-gradients-dropped",
        "                if used[i]:\n                    add_to_gradient",
        "                if not used[i]:\n                    add_to_gradient",
        "tests/step/test_late_gradients.py",
        "the gradients of a second backward in a micro-batch are lost",
    ),
    Mutant(
        "norm-without-late-gradients",
        "            if w.has_late:",
        "            if False:",
        "tests/step/test_late_gradients.py",
        "gradients are clipped by the norm of those that were sent in time",
    ),
    Mutant(
        "late-gradients-of-one-part",
        "    runtime.engine.add_late(used, place)\n    sum_partial(runtime, place)",
        "    runtime.engine.add_late(used, place)",
        "tests/step/test_late_gradients.py",
        "late gradients of parameters that the ranks along tp share stay parts",
    ),
    Mutant(
        "last-bucket-too-early",
        "while self._num_sent < len(self.buckets) - 1 and not",
        "while self._num_sent < len(self.buckets) and not",
        "tests/step/test_late_gradients.py -k 'not tp'",
        "what a second backward adds in a model of one bucket comes late, and takes a third exchange",
    ),
    Mutant(
        "unused-gets-zeros",
        "return None if self._is_alone else torch.tensor(list(self._used), dtype=torch.uint8)",
        "return None if self._is_alone else torch.ones(len(self._used), dtype=torch.uint8)",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[odd-ddp-4-acc1-noclip-blocks]'",
        "parameters that no rank used get zeros, and decay by the optimizer's weight decay",
    ),
    Mutant(
        "other-backwards-unseen",
        "    if reached is not None and not reached.is_gathered and not is_hidden:\n",
        "    if reached is not None and not reached.is_gathered and not is_hidden and begun[0].num_windows < 2:\n",
        "tests/techniques/data/test_hooks_off.py -k later_beside",
        "a penalty whose backward a loss begins to run later counts once for each rank",
    ),
    Mutant(
        "hooks-off-for-good",
        "            (hooks.resume if of_parts else hooks.pause)()",
        "            (hooks.pause if not of_parts else list)()",
        "tests/techniques/data/test_hooks_off.py",
        "after a step, losses of parts of a replica are taken for weight penalties",
    ),
    Mutant(
        "norm-of-the-first-part",
        "tensor_split(data.size)[data.rank]",
        "tensor_split(data.size)[0]",
        "tests/step/test_optim_clip.py -k 'a_step_tells'",
        "the norm of replicas counts one part of the gradients once for each rank",
    ),
    Mutant(
        "norm-of-what-was-sent-first",
        "self._state, self._late, self._flats = State.OUTSIDE, {}, []",
        "self._state, self._late = State.OUTSIDE, {}",
        "tests/step/test_late_gradients.py",
        "gradients that came late are in the step, and not in its norm",
    ),
    Mutant(
        "norm-of-nothing",
        "[share for share in shares if share.numel()]",
        "shares",
        "tests/step/test_optim_clip.py -k 'a_step_tells'",
        "the largest gradient element of a bucket with fewer numbers than ranks is an error of torch's on one rank",
    ),
    Mutant(
        "refused-hook-accepted",
        "            self._refuse_new_hooks(parts())\n            self._accepted_hooks = hooks",
        "            self._accepted_hooks = hooks\n            self._refuse_new_hooks(parts())",
        "tests/techniques/data/test_hooks.py -k wrong_hook",
        "a hook that was refused once, and the error caught, is never called",
    ),
    Mutant(
        "copies-along-tp-counted",
        "if data.size == self.world.size and not",
        "if not",
        "tests/step/test_optim_clip.py -k 'a_step_tells'",
        "replicas over tensor-parallel ranks count gradients of whole parameters once for each of those",
    ),
    Mutant(
        "long-sums-in-float32",
        "if tensor.numel() <= _CHUNK or",
        "if tensor.numel() >= 0 or",
        "tests/step/test_optim_clip.py -k millions",
        "the norm of millions of float32 elements is 2e-4 off on the CPU",
    ),
    Mutant(
        "bucket-size-ignored",
        "if not groups or size >= cap_bytes or _kind(",
        "if not groups or _kind(",
        "'tests/techniques/test_knobs.py::test_a_knob_shows[20-2]'",
        "bucket_cap_mb has no effect, and no gradient travels before the backward has ended",
    ),
    Mutant(
        "penalty-summed",
        "        raise _penalty(reached)",
        "        pass",
        "tests/techniques/data/test_own_loops.py -k past_the_outputs_is_refused",
        "a weight penalty's own backward counts once for each replica",
    ),
    # ---- techniques: penalties and paddings --------------------------------------------------------------------------
    Mutant(
        "penalty-once-per-replica",
        "    return 1 / num\n",
        "    return 1.0\n",
        "tests/techniques/data/test_own_loops.py -k weight_penalty_counts_once",
        "a weight penalty counts once for each replica",
    ),
    Mutant(
        "penalty-once-per-shard",
        "num = 1 if runtime.recipe.is_cut and name not in runtime.replicated else",
        "num = 1 if runtime.recipe.is_cut else",
        "tests/techniques/data/test_own_loops.py -k weight_penalty_counts_once",
        "the penalty of a 0-dim parameter counts once for each rank",
    ),
    Mutant(
        "buffers-compared-without-order",
        "mixed = (words + 0x9E3779B9) * places",
        "mixed = words",
        "tests/model/test_checksums.py -k order_of_bytes",
        "on a GPU, ranks keep buffers whose elements lie in other places",
    ),
    Mutant(
        "imaginary-part-turned",
        "both = torch.complex(pair[0], pair[1])",
        "both = torch.complex(pair[0], -pair[1])",
        "tests/step/test_exchange.py -k complex",
        "the gradient of a complex number points the other way",
    ),
    Mutant(
        "padding-has-a-gradient",
        "return torch.zeros_like(grad) if pads() and grad is not None else None",
        "return None",
        "tests/techniques/data/test_own_loops.py -k a_padding_counts_as_0",
        "a micro-batch that is only there to fill up is trained on",
    ),
    Mutant(
        "paddings-in-another-order",
        "in_order = paddings.pop(0)",
        "in_order = paddings.pop()",
        "tests/techniques/data/test_own_loops.py -k a_padding_counts_as_0",
        "in a loop of the user's own the first micro-batch counts as 0 in place of the padding",
    ),
    # ---- techniques: precision ---------------------------------------------------------------------------------------
    Mutant(
        "inputs-cast-unasked",
        'if said.cast_inputs != "none" and said.compute is not None:',
        "if said.compute is not None:",
        "tests/techniques/precision/test_precision.py -k 'cast_as_asked or inputs_are_cast'",
        'positions are rounded to bfloat16 though cast_inputs="none"',
    ),
    Mutant(
        "part-writes-into-a-copy",
        "given.copy_(x)",
        "pass",
        "tests/techniques/precision/test_precision_parts.py -k changed_in_place",
        "what a part of another precision changes in place is lost",
    ),
    Mutant(
        "change-behind-a-part-lost",
        "return exact if same else x.to(exact.dtype)",
        "return exact",
        "tests/techniques/precision/test_precision_parts.py -k changed_in_place",
        "logits that were changed after the head are handed out as they were before",
    ),
    Mutant(
        "frozen-parameters-cast",
        "storage = (precision.storage if fact.trainable else precision.compute if is_base else None) or fact.dtype",
        "storage = precision.storage or fact.dtype",
        "tests/parallel/test_compose.py -k frozen",
        "frozen bfloat16 weights are stored in float32, at twice the bytes",
    ),
    Mutant(
        "cast-before-a-write",
        "if self._reuses and self.version() == self._version:",
        "if self._reuses:",
        "tests/techniques/data/test_alone.py -k seen_by_the_next_forward",
        "on one rank, parameters that a step's forward writes are not what its next micro-batch computes with",
    ),
    Mutant(
        "gathered-in-each-micro-batch",
        "        self.order.units.root.end_reuse(is_last)\n",
        "        self.order.units.root.end_reuse(True)\n",
        "tests/step/test_bytes.py",
        "a model of one unit is gathered for each micro-batch of a step",
    ),
    Mutant(
        "python-state-taken-for-the-same",
        "            if part.tobytes() != seen:\n                return False",
        "            if part.tobytes() != seen:\n                return True",
        "tests/world/test_global_numbers.py",
        "a block that draws by Python's random gets other numbers in its second run",
    ),
    Mutant(
        "casts-kept-for-ever",
        "            self.order.reuse(False, root=self._keeps_root)\n",
        "            pass\n",
        "tests/techniques/data/test_alone.py -k cast_once",
        "on one rank, a second copy of the model stays in memory",
    ),
    Mutant(
        "sums-of-one-rank-lost",
        "whole = grad if total is None else total",
        "whole = grad",
        "tests/techniques/data/test_alone.py -k every_option",
        "on one rank, gradients of all micro-batches but the last are lost",
    ),
    Mutant(
        "last-sum-of-one-rank-lost",
        "for total, grad in both if total is not None and grad is not None]",
        "for total, grad in both if total is not None and grad is None]",
        "tests/techniques/data/test_alone.py -k every_option",
        "on one rank, the gradients of the last micro-batch are lost",
    ),
    Mutant(
        "guards-off-for-ever",
        "        self._guards.resume()\n",
        "",
        "tests/techniques/data",
        "a part that is called by itself computes with shards, or ends in an error of torch's",
    ),
    Mutant(
        "labels-counted-before-a-change",
        "if not self._copied or changed or len(self) != len(self._copied):",
        "if not self._copied:",
        "tests/data/test_host_copies.py",
        "on a GPU, the loss is divided by the number of labels from before a loop masked some",
    ),
    Mutant(
        "a-copy-that-nothing-checks",
        'if "tokens again" in summed and float(summed["tokens again"]) != tokens:',
        "if False:",
        "tests/data/test_host_copies.py",
        "on a GPU, labels written through .data are counted as they were before",
    ),
    Mutant(
        "sums-read-early",
        "        return work.totals, work.detached\n",
        "        return {name: value.cpu() for name, value in work.totals.items()}, work.detached\n",
        "tests/step/test_reads.py -k one_rank",
        "nothing but time: the host waits for the device once more in each step",
    ),
    # ---- data: streams, workers, padding -----------------------------------------------------------------------------
    Mutant(
        "workers-collect-the-ranks-garbage",
        "    gc.freeze()\n    gc.enable()\n    rank",
        "    gc.enable()\n    rank",
        "tests/data/test_workers.py -k garbage",
        "a worker crashes when it destroys what belongs to the rank's threads",
    ),
    Mutant(
        "stream-that-raised-is-over",
        "            self.end()  # a generator that has raised gives nothing more, which would look like the epoch's end\n",
        "",
        "tests/data/test_stream.py -k raised",
        "the rest of an epoch is missed after an error that was caught",
    ),
    Mutant(
        "stream-state-of-the-last-epoch",
        "self.dataset.load_state_dict(copy.deepcopy(self._first if state is None else state))",
        "self.dataset.load_state_dict(copy.deepcopy(state)) if state is not None else None",
        "tests/data/test_stream.py -k each_epoch",
        "the second epoch of a stream with a state is empty",
    ),
    Mutant(
        "stream-digest-of-nothing",
        "            self.digest = _digest(sample, self.digest)",
        "            pass",
        "tests/data/test_stream.py -k splits_itself",
        "a stream that splits itself over ranks trains on half of it",
    ),
    Mutant(
        "padding-is-learned",
        '        padded["attention_mask"] = (torch.arange(ids.shape[1]) < lengths[:, None]).long()',
        "        pass",
        "tests/data/test_padding.py",
        "padding tokens are trained on",
    ),
    # ---- data: fine-tuning -------------------------------------------------------------------------------------------
    Mutant(
        "any-key-taken-as-read",
        "            if text({name}) != whole:",
        "            if True:",
        "tests/data/sft/test_keys.py -k 'another_without_it'",
        "thoughts and calls that the chat template leaves out are not trained on, without a word",
    ),
    Mutant(
        "key-behind-another-one",
        "            return _is_double(name, messages) and",
        "            return",
        "tests/data/sft/test_keys.py -k 'one_value'",
        "a key is left out for another one that says something else",
    ),
    Mutant(
        "bos-twice",
        "if first is not None and ids[:2] == [first, first]:",
        "if False:",
        "tests/data/sft/test_answers.py -k 'nothing_else and bos'",
        "a text that begins with BOS begins with two",
    ),
    Mutant(
        "prompts-trained-on",
        "inside = any(first <= start < last for first, last in spans)",
        "inside = True",
        "tests/data/sft/test_answers.py -k nothing_else",
        "what the user says is learned, not only the answers",
    ),
    Mutant(
        "blanks-of-the-prompt-trained-on",
        "any(first < start <= last for first, last in spans)",
        "any(first <= start <= last for first, last in spans)",
        "tests/data/sft/test_answers.py -k blanks",
        "the blank that ends a prompt is learned as the beginning of each answer",
    ),
    Mutant(
        "only-ends-learned",
        "if len(targets) and not isinstance(record, Text) and end is not None and (targets == end).all():",
        "if False:",
        "tests/data/sft/test_answers.py -k without_an_answer",
        "of short answers that begin inside a token a model learns to stop at once",
    ),
    Mutant(
        "answers-do-not-end",
        "return [*ids, last], [*trained, True]",
        "return [*ids, last], [*trained, False]",
        "tests/data/sft/test_answers.py -k nothing_else",
        "a model that was tuned on completions never stops",
    ),
    Mutant(
        "template-taken-at-its-word",
        "if not whole.startswith(upto):",
        "if False:",
        "tests/data/sft/test_answers.py -k does_not_show",
        "a template that writes earlier answers otherwise moves what is trained on",
    ),
    Mutant(
        "empty-answers-learned",
        'return "" if all(said) else',
        'return "" if True else',
        "tests/data/sft/test_answers.py -k without_an_answer",
        "a model learns to say nothing",
    ),
    Mutant(
        "packed-positions-go-on",
        "places = torch.cat([torch.arange(len(ids)) for ids, _ in parts])",
        "places = torch.arange(len(ids))",
        "tests/data/sft/test_packing.py -k 'single_records or anew'",
        "a packed document attends to those before it",
    ),
    Mutant(
        "packed-with-a-cache",
        '{"use_cache": False} if "position_ids" in named',
        '{} if "position_ids" in named',
        "tests/data/sft/test_packing.py -k 'single_records or refused'",
        "models of transformers make a cache, and their packed documents see each other",
    ),
    Mutant(
        "packing-not-tried",
        "return bool((one - two).abs().max() > 1e-6 * one.abs().max())",
        "return False",
        "tests/data/sft/test_packing.py -k refused",
        "a model whose attention goes from document to document trains on packed samples",
    ),
    Mutant(
        "packing-tried-with-one-sample",
        "if not _crosses(model, forward, num_samples):",
        "if not _crosses(model, forward, 1):",
        "tests/data/sft/test_packing.py -k flash",
        "with a flash kernel and larger micro-batches packed documents attend to each other",
    ),
    Mutant(
        "parts-put-into-train-mode",
        "module.training = mode\n",
        "module.training = model.training or any(modes.values())\n",
        "tests/run/test_reference.py -k eval_mode",
        "frozen norms and dropout that are kept in eval mode are trained",
    ),
    # ---- run: figures, loggers, traces ------------------------------------------------------------------------------
    Mutant(
        "operations-of-padding",
        "lengths = np.array([config.data.seq_len]) if self._lengths is None else self._lengths",
        "lengths = np.array([config.data.seq_len])",
        "tests/run/test_device_use.py -k figures_of_a_step",
        "tflops and mfu of short records are several times what is computed",
    ),
    Mutant(
        "entries-of-the-loss-over-figures",
        "refuse_taken_names(out.metrics or ())",
        "pass",
        "tests/cli/test_train_own.py -k name_of_a_figure",
        "a metric called lr, tokens or epoch is logged as the run's own figure",
    ),
    Mutant(
        "rate-of-the-first-group",
        'next((group["lr"] for group in groups if group.get("initial_lr") == base), groups[0]["lr"])',
        'groups[0]["lr"]',
        "tests/run/test_optim.py -k rate_that_is_logged",
        "the rate of the embedding alone is logged as that of the run",
    ),
    Mutant(
        "csv-keeps-steps-done-again",
        'rows = [row for row in reader if int(row["step"] or 0) <= done]',
        "rows = list(reader)",
        "tests/run/test_loggers.py -k CSV",
        "a resumed run has some steps twice in its CSV",
    ),
    Mutant(
        "tensorboard-keeps-steps-done-again",
        "purge_step=done + 1 if done else None",
        "purge_step=None",
        "tests/run/test_loggers.py -k TensorBoard",
        "a resumed run has some steps twice in TensorBoard",
    ),
    Mutant(
        "failing-logger-ends-training",
        "        except Exception as error:  # of a library or the user's: training is worth more than its picture",
        "        except ZeroDivisionError as error:",
        "tests/run/test_loggers.py -k ones_own",
        "a lost connection to a logger ends the training",
    ),
    Mutant(
        "mfu-of-one-device",
        "rate = self._flops * steps_per_s / self._world.size",
        "rate = self._flops * steps_per_s",
        "tests/run/test_device_use.py -k figures",
        "MFU is too large by the number of ranks",
    ),
    Mutant(
        "profile-one-step-more",
        "step == self._window.stop - 1:",
        "step == self._window.stop:",
        "tests/run/test_diagnostics.py -k trace",
        "a trace holds other steps than were asked for",
    ),
    Mutant(
        "rank-logs-too-early",
        "            if self._held is None:\n                self._write(rank, text)",
        "            if True:\n                self._write(rank, text)",
        "tests/cli/test_rank_logs.py",
        "a run that is refused leaves a folder",
    ),
    # ---- techniques: running again and compiling ---------------------------------------------------------------------
    Mutant(
        "one-of-a-pair-unseen",
        "known = _KnownState(bits, (address + _NUM_WORDS * 4, 4), (address, 4 * _FIRST_WORDS), left_over)",
        "known = _KnownState(bits, (address + _NUM_WORDS * 4, 4), (address, 4 * _FIRST_WORDS))",
        "tests/world/test_global_numbers.py",
        "a block that draws one normal number of numpy's draws another when it runs again",
    ),
    Mutant(
        "dropout-drawn-anew",
        "            generator.set_state(state)",
        "            pass",
        "tests/techniques/remat/test_traps_remat.py -k dropout_and_noise",
        "dropout has another mask when a block runs again, and gradients are wrong",
    ),
    Mutant(
        "python-numbers-drawn-anew",
        "with self.numbers.again(), self._surroundings():",
        "with self._surroundings():",
        "tests/techniques/remat/test_traps_remat.py -k dropout_and_noise",
        "numbers of Python and numpy are other ones when a block runs again",
    ),
    Mutant(
        "remat-budget-of-one-rank",
        "found = {name: among_ranks([rank.get(name) for rank in by_rank]) for name in self._names}",
        "found = {name: self._measured.get(name) for name in self._names}",
        "tests/techniques/remat/test_budget.py -k 'choose_alike or larger_batch'",
        "ranks keep other blocks than each other, and wait for each other's gathers",
    ),
    Mutant(
        "remat-keeps-what-changes",
        "            self._changed.add(call)\n",
        "            pass\n",
        "tests/techniques/remat/test_budget.py -k 'same_bits or changed_in_place'",
        "a result that is changed in place later is kept: an error of torch in backward",
    ),
    Mutant(
        "remat-counts-what-is-not-kept",
        "        elif (call := self._maker(address)) is not None:\n            self._kept[call, address] = num_bytes\n",
        "",
        "tests/techniques/remat/test_budget.py -k Bytes",
        "a budget is held by numbers that are not what is kept",
    ),
    Mutant(
        "remat-shared-inputs-each-time",
        "            if address in seen and not seen[address].expired():\n                continue\n",
        "",
        "tests/techniques/remat/test_budget.py -k share_count_once",
        "a budget counts the mask once for each block",
    ),
    Mutant(
        "remat-keeps-another-call",
        "        num_of[op] += 1\n        return CheckpointPolicy",
        "        return CheckpointPolicy",
        "tests/techniques/remat/test_budget.py -k Bytes",
        "results are kept that were not chosen",
    ),
    Mutant(
        "remat-selective-keeps-more",
        "return chosen if chosen.num_bytes < block.plain_bytes else Choice",
        "return chosen if True else Choice",
        "tests/techniques/remat/test_choice.py tests/techniques/remat/test_remat.py -k 'selective'",
        "selective takes more memory than no remat",
    ),
    Mutant(
        "remat-over-budget",
        "        if chosen[i] is low and extra <= left:",
        "        if chosen[i] is low:",
        "tests/techniques/remat/test_choice.py -k budget",
        "out of memory under a budget",
    ),
    Mutant(
        "remat-gathers-in-selective",
        "            with unseen():  # selective checkpointing knows the operators of the first run, where this was not needed\n                child.__dict__[GATHERS](child)\n",
        "            child.__dict__[GATHERS](child)\n",
        "tests/techniques/remat/test_budget.py -k choose_alike",
        "selective remat of a block that ranks skip ends in an error of torch",
    ),
    Mutant(
        "batch-counted-twice",
        "            if self.written:\n                stack.enter_context",
        "            if False:\n                stack.enter_context",
        "tests/techniques/remat/test_traps_remat.py -k buffers_count_a_batch_once",
        "batch norm counts a batch twice where its block runs again",
    ),
    Mutant(
        "own-generators-drawn-anew",
        "self.generators = [(g, snapshot(g)) for g in _generators(self.state, leaves)]",
        "self.generators = []",
        "tests/techniques/remat/test_second_runs.py -k generator_that_a_module_keeps",
        "a generator that a module keeps draws other numbers when its block runs again",
    ),
    Mutant(
        "attributes-looked-at-once",
        "if kinds != state.kinds[i]:",
        "if not state.kinds[i]:",
        "tests/techniques/remat/test_second_runs.py -k generator_that_a_module_keeps",
        "a generator that a module is given later draws other numbers when its block runs again",
    ),
    Mutant(
        "second-run-loosely-compared",
        "size = min(1e-2, 1e3 * torch.finfo(tensor.dtype).eps)",
        "size = 1e2",
        "tests/techniques/remat/test_second_runs.py tests/techniques/remat/test_traps_remat.py -k 'cannot_be_put_back or cannot_run_twice'",
        "a block whose second run differs from its first trains with wrong gradients",
    ),
    Mutant(
        "graphs-used-up",
        "compiled = compile_with_limit(_isolated(function), min(_GRAPHS * num_blocks, 256), **options)",
        "compiled = torch.compile(function, **options)",
        "tests/techniques/compile/test_compile.py -k t32",
        "many blocks of other kinds use up torch's limit of graphs, and the rest runs uncompiled",
    ),
    # ---- techniques: all of them at once -------------------------------------------------------------------------------
    Mutant(
        "rule-left-out",
        "            technique.rule(draft, found, **chosen[technique.name])",
        "            pass",
        "tests/techniques/test_make.py",
        "what a technique says of dtypes, units and cuts is not in the recipe",
    ),
    Mutant(
        "structure-of-one-side",
        "        return with_values_of_proof(prepared(self.build(), self.parallel))",
        "        return self.build()",
        "tests/techniques/test_toys.py -k verify_changes_both_sides",
        "verify compares a model whose structure a technique has not changed",
    ),
    Mutant(
        "recipe-of-another-technique",
        "            if cls is None:\n                raise msgspec.ValidationError",
        "            if cls is None:\n                continue\n            if False:\n                raise msgspec.ValidationError",
        "tests/techniques/test_make.py -k carried_out",
        "a recipe that asks for a technique which there is not is carried out without it",
    ),
    Mutant(
        "version-1-without-offload",
        '"offload": ("data", "offload"),',
        "",
        "tests/techniques/test_make.py -k version_1",
        "recipes of an older version are refused, though they can be read",
    ),
    Mutant(
        "cut-inside-out",
        "self.cuts.setdefault(name, []).append(cut)",
        "self.cuts.setdefault(name, []).insert(0, cut)",
        "tests/techniques/tp/test_parity.py tests/techniques/tp/test_pairs.py",
        "what was cut over tp first is taken for cut over fsdp first: other rows on each rank",
    ),
    Mutant(
        "partial-gradients-stay-partial",
        "        sum_partial(self.runtime, place)\n",
        "",
        "tests/techniques/test_toys.py -k run_on_a_new_axis",
        "each rank steps with its own part of a gradient",
    ),
    Mutant(
        "tokens-counted-by-each-copy",
        '"tokens": tokens if runtime.world.counts_data else 0,',
        '"tokens": tokens,',
        "tests/techniques/test_toys.py -k run_on_a_new_axis",
        "ranks that read the same data count it once each: the loss is too small by tp",
    ),
    Mutant(
        "loss-counted-by-each-copy",
        "value if counts else torch.zeros(()) for name",
        "value for name",
        "tests/techniques/test_toys.py -k run_on_a_new_axis",
        "the loss that is reported is tp times too large",
    ),
    Mutant(
        "one-mesh-for-all-axes",
        '        if axis == "fsdp" and self.axis(axis).size == self.layout.dp_shard:',
        "        if True:",
        "tests/techniques/test_toys.py -k mesh_of_their_own",
        "parameters are sharded over dp_shard, whatever axis the recipe cuts them over",
    ),
    Mutant(
        "shapes-unlooked-at",
        "        if has != said:",
        "        if False:",
        "tests/techniques/test_toys.py -k positions_over",
        "a rank that has other rows than the recipe says is not refused",
    ),
    Mutant(
        "tokens-of-each-rank-with-positions",
        '"tokens": tokens if runtime.world.counts_data else 0,',
        '"tokens": tokens if runtime.world.counts else 0,',
        "tests/techniques/test_toys.py -k positions_over",
        "ranks that have positions of the same samples count them all, each",
    ),
    Mutant(
        "evaluation-counts-each-rank-with-positions",
        '"tokens": self.tokens if counts_data else 0,',
        '"tokens": self.tokens if counts else 0,',
        "tests/techniques/test_toys.py -k positions_over",
        "the mean of an evaluation is over as many times the tokens",
    ),
    Mutant(
        "gradients-put-aside-before-the-loop-clears-them",
        "GradStash(runtime, waits=not is_step)",
        "GradStash(runtime, waits=False)",
        "tests/step/test_clears.py -k from_before",
        "what a loop clears by hand, as the first line of a window, is added back",
    ),
    Mutant(
        "gradients-from-before-summed-again",
        "        self._stash.take()\n        self.runtime.engine.complete",
        "        self.runtime.engine.complete",
        "tests/step/test_clears.py -k run_no_backward",
        "parts along tp from before a window are summed once more in it",
    ),
    Mutant(
        "writes-of-a-padding-seen-by-its-backward",
        "contextlib.nullcontext() if has_backward else",
        "contextlib.nullcontext() if True else",
        "tests/step/test_schedule.py",
        "batch norm's statistics are put back between a padding's forward and its backward, which torch refuses",
    ),
    Mutant(
        "zero-grad-of-torch-stays-replaced",
        "    while _torchs and not _clearing:",
        "    while _torchs and _clearing:",
        "tests/step/test_clears.py -k own_methods",
        "every optimizer of the process runs another zero_grad",
    ),
    Mutant(
        "numbers-of-a-backward-from-the-start",
        "        if left:\n            set_streams",
        "        if False:\n            set_streams",
        "tests/step/test_schedule.py",
        "a backward that other micro-batches have come before draws its forward's numbers again",
    ),
    Mutant(
        "units-kept-for-another-micro-batch",
        "        if self.units.kept and any(others):",
        "        if False:",
        "tests/step/test_schedule.py -k hides",
        "a backward frees what that of another micro-batch still reads",
    ),
    Mutant(
        "loss-on-the-whole-micro-batch",
        "mine = batch if loss is None else runtime.for_loss(batch)",
        "mine = batch",
        "tests/techniques/test_toys.py -k positions_over",
        "a rank's part of the output meets the labels of all positions",
    ),
    Mutant(
        "unsaid-axis-taken",
        "        if wrong is not None:\n            said",
        "        if False:\n            said",
        "tests/techniques/test_make.py -k axis",
        "gradients of an axis are summed over nobody, or too many",
    ),
    Mutant(
        "ranks-of-a-carved-axis-pinned",
        " and cut.axis in (*AXES, *DERIVED_AXES):",
        ":",
        "tests/recipe/test_cuts.py -k carved",
        "ranks that hold the same piece are not known to: norms count it several times",
    ),
    Mutant(
        "every-stage-holds-all",
        "        return intervals if index == cut.holder else ()",
        "        return intervals",
        "tests/recipe/test_cuts.py -k stage",
        "what one stage holds is taken to be on all of them",
    ),
    Mutant(
        "one-group-for-several-meshes",
        "        if param.cuts[-1].axis != self.axis:\n            return False\n",
        "",
        "tests/techniques/test_toys.py -k mesh_of_their_own",
        "parameters of two meshes are gathered as one",
    ),
    Mutant(
        "digest-of-all-groups",
        "x if index == scope.index else 0.0 for index",
        "x for index",
        "tests/world/test_scopes.py",
        "ranks of different stages are taken to have entered other units",
    ),
    Mutant(
        "any-axis-taken",
        "        if axis not in axes and degree != 1:",
        "        if False:",
        "tests/test_layout.py -k without_a_technique",
        "a layout with an axis that nothing is laid over computes the same on each of its ranks, without a word",
    ),
    Mutant(
        "newer-torch-trusted",
        "    if _outcome[0]:\n        raise UnsupportedError(",
        "    if False:\n        raise UnsupportedError(",
        "tests/verify/test_torch_check.py -k fails",
        "a torch that gathers in another order trains on",
    ),
    Mutant(
        "names-not-looked-for",
        "return [name for probe in PROBES if not probe.without for name in probe.missing()]",
        "return []",
        "tests/torch_names -k gone",
        "a private name that is gone is found in the middle of a run",
    ),
    # ---- gradients, for both engines and windows -----------------------------------------------------------------------
    Mutant(
        "dropped-backward-unseen",
        "return self._call is not None and self._call() is not None",
        "return self._call is not None",
        "tests/techniques/data/test_loops.py tests/techniques/data/test_own_loops.py tests/step/test_backwards.py",
        "a backward that raised is taken for one that still runs, and its gradients are summed with the next",
    ),
    Mutant(
        "aside-at-any-backward",
        "if not stash.has_any or _comes_to(stash.runtime, backward):",
        "if True:",
        "tests/techniques/data/test_zero_grad.py -k cleared_wherever",
        "gradients that a loop clears by hand come back at the end of its window",
    ),
    Mutant(
        "second-model-counts-anew",
        'runtime.step = self._state.get("windows", {}).get(prefix, runtime.step)',
        "pass",
        "tests/state/test_checkpoint_extra.py -k draws_on",
        "a second model draws other random numbers after a resume",
    ),
    Mutant(
        "aside-is-lost",
        "            add_to_gradient(self.runtime.parameters[name], grad)",
        "            pass",
        "tests/step/test_window.py tests/techniques/data/test_loops.py",
        "gradients of earlier windows are dropped",
    ),
    Mutant(
        "padding-counts",
        "        self.is_on = is_on\n",
        "        self.is_on = False\n",
        "tests/techniques/data/test_own_loops.py -k a_padding_counts_as_0",
        "micro-batches that only fill up count as data",
    ),
    # ---- parallel: values and building -----------------------------------------------------------------------------
    Mutant(
        "layers-start-alike",
        'derive_seed(self.seed, "init", *place)',
        'derive_seed(self.seed, "init")',
        "tests/parallel/test_tape.py -k two_equal_layers",
        "all layers of one shape start with the same weights",
    ),
    Mutant(
        "draws-of-a-tensor-alike",
        "ordinal += 1",
        "ordinal += 0",
        "tests/parallel/test_init_seeded.py -k two_draws",
        "two draws that make one parameter are the same numbers",
    ),
    Mutant(
        "values-by-the-number-of-threads",
        "torch.set_num_threads(1)\n    try:\n        yield\n    finally:\n        torch.set_default_dtype(dtype)",
        "try:\n        yield\n    finally:\n        torch.set_default_dtype(dtype)",
        "tests/parallel/test_tape.py -k number_of_threads",
        "ranks with other numbers of threads start with other last bits",
    ),
    Mutant(
        "default-dtype-of-the-end",
        "if torch.get_default_dtype() != entry.default_dtype:",
        "if entry.default_dtype is None:",
        "tests/parallel/test_tape.py -k default_dtype",
        "weights are made in another dtype than their constructor did",
    ),
    Mutant(
        "other-constructions-believed",
        "if first is None and len({digest for _, digest, _ in seen}) > 1:",
        "if first is None and len({digest for _, digest, _ in seen}) > 2:",
        "tests/parallel/test_init_seeded.py tests/parallel/test_init_torchrun.py -k 'same_on_every_rank or real_number or cannot_be_replayed'",
        "a constructor that does other things on each rank gives each its own weights",
    ),
    Mutant(
        "frozen-at-random",
        "    if drawn and matched.tensors:",
        "    if False:",
        "tests/state/test_wrapped_layers.py",
        "a model trains on frozen layers that were drawn at random",
    ),
    Mutant(
        "drawn-though-loaded",
        "return version_of(param) == version and self.tape.is_random(",
        "return self.tape.is_random(",
        "tests/state/test_wrapped_layers.py",
        "weights that torch has loaded before have to be loaded again",
    ),
    Mutant(
        "cast-at-the-call",
        "        if made.dtype != tensor.dtype:",
        "        if False:",
        "tests/parallel/test_module_guards.py -k casts",
        "a model that was cast trains until an optimizer steps",
    ),
    Mutant(
        "functional-call-unused",
        "known is None or not known[2] or own is None or own is value:",
        "True:",
        "tests/parallel/test_module_guards.py -k functional_call",
        "values that functional_call is given are not used",
    ),
    Mutant(
        "names-put-together",
        "                self._note_space(f\"{home.get('__name__')}\", home)\n",
        "                pass\n",
        "tests/techniques/tp/test_places.py -k put_together-outside-False",
        "the search for tp leaves a global whose name is put together",
    ),
    Mutant(
        "environment-kept",
        "        if value is os.environ:\n",
        "        if False:\n",
        "tests/techniques/tp/test_places.py -k in_environ-cut-False",
        "the search for tp leaves what a forward writes into os.environ",
    ),
    Mutant(
        "composed-again",
        "        before_composable(_refuse_again)\n",
        "",
        "tests/parallel/test_module_guards.py -k functions_of_torch",
        "distribute_module makes other tensors of parameters that are cut",
    ),
    Mutant(
        "wrapped-again",
        "    if any(child in _known for child in module.modules()):",
        "    if False:",
        "tests/parallel/test_module_guards.py -k wrappers",
        "DDP around replicas sums their gradients twice",
    ),
    Mutant(
        "two-threads",
        "if self._busy is not None and self._busy[0] is not now:",
        "if False:",
        "tests/test_said_early.py -k beside_training",
        "an evaluation in a thread exchanges with another rank's training",
    ),
    Mutant(
        "attributes-of-each-rank",
        "    set_streams(theirs, _CPU)\n    try:",
        "    try:",
        "tests/parallel/test_init_seeded.py tests/parallel/test_init_rank0.py -k 'plain_attributes or real_number or rank_dependent'",
        "numbers that a constructor keeps are other ones on each rank",
    ),
    Mutant(
        "old-optimizer-steps-nothing",
        "        if names:\n            raise UsageError",
        "        if None:\n            raise UsageError",
        "tests/test_bad_input.py -k optimizer_built_before_sharding",
        "an optimizer that was built before parallelize trains nothing",
    ),
    Mutant(
        "frozen-later",
        "if same and list(map(_REQUIRES_GRAD, self._real)) == self._trained:",
        "if same:",
        "tests/step/test_window.py tests/techniques/data/test_traps_sharding.py -k 'change_after_sharding or changed_after_sharding'",
        "a block that is unfrozen after parallelize is not summed over the ranks",
    ),
    Mutant(
        "names-of-a-tie",
        "found.setdefault(id(tensor), (name, tensor))",
        "found[id(tensor)] = (name, tensor)",
        "tests/techniques/data/test_ties.py tests/techniques/data/test_traps_sharding.py -k 'tied or two_names or unties'",
        "a tied tensor is known by another name than the recipe has for it",
    ),
    Mutant(
        "transform-returns-in-vain",
        "module = result if result is not None else module",
        "module = module",
        "tests/techniques/transforms/test_transforms.py -k 'list_order'",
        "a module that a transform returns is dropped",
    ),
    Mutant(
        "transforms-in-any-order",
        "if name in names[i + 1 :]]",
        "if name in names[len(names) :]]",
        "tests/techniques/transforms/test_transforms.py",
        "a transform runs before the one that it must come after",
    ),
    Mutant(
        "parts-of-a-block-not-split",
        'return tuple(name for name in names if not any(name.startswith(f"{outer}.") for outer in names))',
        "return tuple(names)",
        "tests/techniques/data/test_units_words.py -k 'units_and_gradients and Nested'",
        "units='no_split' is refused where a listed class holds another",
    ),
    Mutant(
        "copies-never-compared",
        "    ranks = unequal(runtime, sums_of_copies(runtime, local))\n",
        "    ranks = ()\n",
        "tests/parallel/test_copies.py -k refused_by_name",
        "weights that each rank has drawn for itself after parallelize stay apart, and rank 0's alone are saved",
    ),
    Mutant(
        "stepped-while-gradients-wait",
        'gradients.of == "accumulate" and gradients.has_begun:',
        'gradients.of == "accumulate" and not gradients.has_begun:',
        "tests/techniques/data/test_loops.py -k before_the_last_micro_batch",
        "an optimizer steps with the gradients of its own rank, and ranks drift apart",
    ),
    # ---- step: window and step ------------------------------------------------------------------------------------
    Mutant(
        "tokens-of-paddings",
        "counted = [h for b, h in zip(batches, on_host, strict=True) if not is_padding(b)]",
        "counted = on_host",
        "tests/step/test_layout_free.py -k run_with_dropout",
        "paddings are counted, so that losses and gradients are too small",
    ),
    Mutant(
        "loss-of-paddings",
        "value = torch.zeros_like(value) if batch.padding else value",
        "value = value",
        "tests/step/test_layout_free.py -k run_with_dropout",
        "the loss that is reported counts the copies that fill up a window",
    ),
    Mutant(
        "same-masks-in-every-step",
        'derive_seed(world.seed, "forward", runtime.step, batch.index)',
        'derive_seed(world.seed, "forward", batch.index)',
        "tests/step/test_silent.py -k masks_of_its_own",
        "dropout has the same masks in every step",
    ),
    Mutant(
        "same-masks-on-every-rank",
        "index=i * axis.size + axis.rank",
        "index=i",
        "tests/step/test_silent.py tests/step/test_streams.py -k 'masks_of_its_own or do_not_depend_on_the_layout'",
        "dropout has the same masks on every rank",
    ),
    Mutant(
        "divided-by-ranks-too",
        'self._scale(sums["loss"] / self._window.num_tokens)',
        'self._scale(sums["loss"] / self._window.num_tokens / self._window.runtime.world.size)',
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[reference-ddp-2-acc1-noclip-default]'",
        "gradients are too small by the number of ranks",
    ),
    Mutant(
        "clip-scaled-gradients",
        "self._scale.unscale()\n        clipping.apply(self._runtime, norm)",
        "clipping.apply(self._runtime, norm)\n        self._scale.unscale()",
        "tests/step/test_scaler.py -k every_kind_of_clipping",
        "under float16 elements are clamped before they are divided by the loss scale: next to nothing is left",
    ),
    Mutant(
        "norm-of-scaled-gradients",
        "norm, loss = float(norm_of.finish(agreed[norm_entry])) / (scale or 1.0),",
        "norm, loss = float(norm_of.finish(agreed[norm_entry])),",
        "tests/step/test_scaler.py -k 'shows_in_backward or every_kind_of_clipping'",
        "under float16 the norm is too large by the loss scale, and gradients are clipped to nothing",
    ),
    Mutant(
        "nan-gradients-stepped",
        "is_finite = math.isfinite(norm) and math.isfinite(loss)",
        "is_finite = math.isfinite(loss)",
        "tests/step/test_scaler.py tests/step/test_step_faults.py -k 'overflow or nan_on_one_rank'",
        "a step with infinite gradients is taken, and the weights are lost",
    ),
    Mutant(
        "skipped-step-moves-the-schedule",
        "            state.restore()\n        self.num_skipped += 1",
        "            state.restore()\n        if self.scheduler is not None:\n"
        "            self.scheduler.step()\n        self.num_skipped += 1",
        "tests/step/test_step_faults.py tests/step/test_scaler.py -k 'skipped'",
        "the learning rate goes on with steps that were not taken",
    ),
    Mutant(
        "skipped-step-moves-buffers",
        "            state.restore()\n        self.num_skipped += 1",
        "            pass\n        self.num_skipped += 1",
        "tests/step/test_silent.py tests/step/test_step_faults.py -k skipped_step",
        "batch norm keeps the statistics of a step that was skipped because they are not finite",
    ),
    Mutant(
        "scale-never-backs-off",
        "self._scale.update(is_finite=is_finite)",
        "self._scale.update(is_finite=True)",
        "tests/step/test_scaler.py -k overflow_on_one_rank",
        "after an overflow the loss scale stays, and every step is skipped",
    ),
    Mutant(
        "overflow-of-one-rank-alone",
        'is_finite = math.isfinite(float(norm.finish(summed["norm"])))',
        "is_finite = math.isfinite(float(norm.finish(norm.entry())))",
        "tests/step/test_scaler.py -k 'shard_of_one_rank'",
        "a rank with an overflow skips the step, the others take it",
    ),
    Mutant(
        "gradients-from-elsewhere",
        _SELF + "refuse_old_gradients(self._runtime)\n",
        "",
        "tests/step/test_silent.py -k gradients_from_elsewhere",
        "gradients from before the step are stepped unclipped and unchecked",
    ),
    Mutant(
        "settings-of-each-rank",
        'if not self._runtime.world.agreement.all_same(agreed["settings"]):',
        'if self._runtime.world.agreement.all_same(agreed["settings"]) is None:',
        "tests/step/test_loop_forgets.py -k settings_were_changed_on_one_rank",
        "a learning rate that one rank has changed lets replicas drift apart",
    ),
    Mutant(
        "own-hook-before-the-step",
        "for before in self._before_step:",
        "for before in ():",
        "tests/step/test_own_methods.py -k called_once_around_the_step",
        "a model's own pre_optimizer_step is never called",
    ),
    Mutant(
        "earlier-gradients-lost",
        "        self._stash.add_back()\n",
        "",
        "tests/step/test_window.py -k window_before_are_added",
        "gradients of an earlier window are lost where two windows make one step",
    ),
    Mutant(
        "unequal-windows-not-seen",
        'if runtime.world.size * sums["length2"] != sums["length"] ** 2:',
        'if runtime.world.size * sums["length2"] < sums["length"] ** 2:',
        "tests/step/test_window.py -k unequal_windows",
        "ranks with other numbers of micro-batches wait for each other in vain",
    ),
    Mutant(
        "other-datasets-not-seen",
        'if not agreement.all_same(sums["dataset"]):',
        'if agreement.all_same(sums["dataset"]) is None:',
        "tests/data/test_same_dataset.py -k ranks_have_other_samples",
        "ranks that shuffled their datasets apart see some samples twice, and others never",
    ),
    Mutant(
        "unused-decays",
        "runtime.parameters[name].grad = None",
        "pass",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[odd-fsdp-2-acc3-clip-blocks]'",
        "sharded parameters that no rank used get zeros, and decay by the optimizer's weight decay",
    ),
    Mutant(
        "statistics-of-each-rank",
        "self._buffers.apply(self.agreed, place)",
        "pass",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[conv-fsdp-2-acc1-noclip-blocks]'",
        "running statistics of batch norm differ between ranks",
    ),
    Mutant(
        "loaded-state-ignored",
        "elif not _same_values(state, self._known.get(param)):",
        "elif param not in self._known:",
        "tests/step/test_optim_local.py -k 'loaded_later or travels'",
        "an optimizer state that is loaded later shows, and steps go on from the old one",
    ),
    Mutant(
        "local-step-unchecked",
        "                check_step(optim)\n",
        "                pass\n",
        "tests/step/test_local_own_loops.py",
        "loops whose optimizer is local are not checked: a mean loss trains with gradients twice as large",
    ),
    # ---- step: clipping and scaling -------------------------------------------------------------------------------
    Mutant(
        "norm-always-of-squares",
        "return (summed + whole) ** (1.0 / self.norm_type)",
        "return (summed + whole) ** 0.5",
        "tests/step/test_optim_clip.py -k norm_and_clipped_gradients",
        "norms of another p than 2 are wrong, and so is what is clipped by them",
    ),
    Mutant(
        "scalars-counted-before-their-sum",
        "if name not in without)",
        "if name not in ())",
        "'tests/verify/test_parity.py::test_sharded_equals_one_process[odd-fsdp-2-acc3-clip-blocks]'",
        "the norm counts gradients of 0-dim parameters once more, as they were before the sum",
    ),
    Mutant(
        "largest-element-without-scalars",
        "return torch.maximum(summed.max(), whole)",
        "return summed.max()",
        "tests/step/test_optim_clip.py -k 'norm_and_clipped_gradients or every_kind_of_clipping'",
        "the largest element of a gradient leaves out 0-dim parameters",
    ),
    Mutant(
        "large-powers-in-float32",
        "wide = torch.float32 if is_plain and dtype != torch.float64 else torch.float64",
        "wide = torch.float32 if dtype != torch.float64 else torch.float64",
        "tests/step/test_optim_clip.py tests/step/test_scaler.py -k 'clip'",
        "norms of a large p are infinite for gradients that are finite",
    ),
    Mutant(
        "small-gradients-scaled-up",
        "if factor < 1.0 and grads:",
        "if grads:",
        "tests/step/test_optim_clip.py -k 'norm_and_clipped_gradients or own_loop'",
        "gradients below the limit are made as large as the limit",
    ),
    Mutant(
        "clamped-one-sided",
        "grad.clamp_(-value, value)",
        "grad.clamp_(max=value)",
        "tests/step/test_optim_clip.py -k 'clamped_gradients'",
        "negative gradient elements are not clamped",
    ),
    # ---- step: sums and means -------------------------------------------------------------------------------------
    Mutant(
        "mean-beside-a-sum-taken",
        'return "part" if abs(self.rest) > max(self.rounding, APART * bend) else "sum"',
        'return "sum"',
        "tests/step/test_sums.py -k no_sum_is_refused",
        "a penalty added to the loss weighs less the more tokens a window has",
    ),
    Mutant(
        "means-in-an-evaluation",
        'if float(agreed["unclear"]):\n            self._check.run([',
        'if agreed["unclear"] is None:\n            self._check.run([',
        "tests/step/test_step_faults.py -k mean_in_an_evaluation",
        "an evaluation whose loss is a mean reports a number that depends on the batches",
    ),
    # ---- step: evaluation -----------------------------------------------------------------------------------------
    Mutant(
        "evaluation-counts-copies",
        "value = value.double() if counts else torch.zeros_like(value, dtype=torch.float64)",
        "value = value.double()",
        "tests/step/test_layout_free.py tests/step/test_streams.py -k evaluation",
        "a validation loss counts batches that a rank repeats to keep step with the others",
    ),
    Mutant(
        "evaluation-in-train-mode",
        "    if on:\n        model.eval()\n    try:\n        yield",
        "    try:\n        yield",
        "tests/step/test_silent.py tests/step/test_streams.py tests/step/test_layout_free.py -k evaluation",
        "dropout and batch norm act in evaluations as in training",
    ),
    Mutant(
        "evaluation-draws-one-stream",
        'derive_seed(world.seed, "evaluate", number)',
        'derive_seed(world.seed, "evaluate")',
        "tests/step/test_streams.py -k each_batch_of_an_evaluation",
        "every batch of an evaluation draws the same numbers",
    ),
    Mutant(
        "evaluation-leaves-a-trace",
        "self._add(item)\n                if state is not None:",
        "self._add(item)\n                if False:",
        "tests/step/test_silent.py -k written_by_an_evaluation",
        "batches that count as nothing change the buffers of a model",
    ),
    Mutant(
        "hooks-of-an-optimizer-see-shards",
        "result = self._run(unhooked_step(optim))",
        "result = self._run(inner)",
        "'tests/step/test_step_hooks.py::test_code_around_a_step_is_right_or_refused[SGD-TrainStep-dp_shard=2]'",
        "a hook that takes a norm takes that of a shard, and each rank divides by another",
    ),
    Mutant(
        "hooks-of-an-optimizer-see-parts",
        "inner = cls.step.__wrapped__ if is_hooked else cls.step",
        "is_hooked, inner = False, cls.step",
        "tests/step/test_step_hooks.py -k wrapped_once",
        "under tp a hook that takes a norm takes that of a part",
    ),
    Mutant(
        "parts-stay-hidden-after-a-step-that-raised",
        "            self._outer.clear()  # as after a forward that was interrupted, which calls no hook\n            self._set(State.SHOWN)",
        "            self._outer.clear()\n        self._set(State.SHOWN)",
        "'tests/techniques/tp/test_read_values.py::test_whenever_a_part_is_read_it_is_refused[tp=2]'",
        "after a step that raised, a norm of a parameter is that of a part",
    ),
    Mutant(
        "hooks-of-modules-see-parts",
        "            for whole, part in gathered:\n                mark_part(whole, part)",
        "            for whole, part in ():\n                mark_part(whole, part)",
        "'tests/techniques/tp/test_read_values.py::test_whenever_a_part_is_read_it_is_refused[dp_shard=2,tp=2]'",
        "a hook of the user's takes the norm of a part that was gathered over dp",
    ),
    Mutant(
        "own-step-sees-shards",
        "if is_elementwise(optim) and not has_own_step(optim):",
        "if is_elementwise(optim):",
        "'tests/step/test_step_hooks.py::test_code_around_a_step_is_right_or_refused[SGD-TrainStep-dp_shard=2]'",
        "an optimizer whose step was replaced is refused by TrainStep",
    ),
    Mutant(
        "gradients-of-freed-parameters",
        "return None if self._is_held else refuse",
        "return None",
        "tests/techniques/data/test_second_order.py -k where_they_are_cut",
        "a gradient penalty under FSDP2 reads freed memory",
    ),
    Mutant(
        "gradients-of-gradients-of-a-part",
        "return SumGradient.apply(grad, ctx.group) if torch.is_grad_enabled() else grad, None",
        "return grad, None",
        "tests/techniques/data/test_second_order.py -k over_tp",
        "a gradient penalty under tp is that of this rank's part",
    ),
    # ---- step: buffers --------------------------------------------------------------------------------------------
    Mutant(
        "buffers-of-another-model-never-agreed",
        "            other.buffers.apply(summed, where)\n",
        "",
        "tests/step/test_backwards.py -k other_models",
        "of a second model in a loss each rank keeps its own buffers",
    ),
    Mutant(
        "buffers-of-accumulate-never-agreed",
        "    gradients.buffers.apply(summed, place)\n",
        "",
        "tests/step/test_buffers.py -k 'names_both and accumulate'",
        "in loops of accumulate each rank keeps its own buffers",
    ),
    Mutant(
        "backward-outside-of-windows",
        "    if (reached := _reached(path, closed, backward.inputs)) is not None:\n",
        "    if False and (reached := _reached(path, closed, backward.inputs)) is not None:\n",
        "tests/step/test_backwards.py -k outside_of_a_window",
        "a backward outside of windows runs until its first gradient, or gives parts along tp for the whole",
    ),
    Mutant(
        "another-models-gradients-stay",
        "        if float(summed[_OTHERS]):\n",
        "        if False:\n",
        "tests/step/test_backwards.py -k other_models",
        "the gradients of a second model in a loss are those of a rank alone",
    ),
    Mutant(
        "gradients-of-another-models-window-dropped",
        "        if isinstance(before, Accumulation) and before.has_gradients:\n",
        "        if False:\n",
        "tests/step/test_backwards.py -k other_models",
        "what a model got in the window of another one is dropped where its own begins inside",
    ),
    Mutant(
        "penalty-beside-a-padding-dropped",
        "    runtime.engine.set_padding(False)\n    try:\n        yield\n",
        "    try:\n        yield\n",
        "tests/step/test_backwards.py -k odd_loops_have",
        "a penalty in accumulate counts 0 on a rank that runs a padding",
    ),
    Mutant(
        "compiled-penalty-summed",
        "path.is_compiled and reached.runtime.engine.hides_outputs",
        "path.is_compiled",
        "tests/step/test_backwards.py -k odd_loops_are_refused",
        "a penalty that torch.compile has compiled counts once for each rank",
    ),
    Mutant(
        "penalties-of-a-rank-alone",
        "        if not self.runtime.world.agreement.all_same(summed[_PENALTIES]):\n",
        "        if False:\n",
        "tests/step/test_backwards.py -k odd_loops_are_refused",
        "a penalty that one rank alone has added counts in part",
    ),
    Mutant(
        "own-gradients-of-inputs-refused",
        "backward.inputs)) is not None:\n        raise outside",
        "())) is not None:\n        raise outside",
        "tests/step/test_clears.py -k trained_through",
        "a plain model is not trained through a sharded one by backward(inputs=...)",
    ),
    Mutant(
        "failure-before-a-window-counts",
        "        self.order.look()  # a backward that raised before the window is not of it\n",
        "",
        "tests/step/test_backwards.py -k checkpoint",
        "a backward that raised before a window is taken for one of its own",
    ),
    Mutant(
        "trial-of-a-loss-counts",
        "        state.restore()\n        kept.restore()\n",
        "        state.restore()\n",
        "tests/step/test_buffers.py -k trials_of_a_loss",
        "what a loss counts is up to five times as much in the first window",
    ),
    Mutant(
        "remat-counts-twice-in-other-modules",
        "modules = [*self._modules, *self._outside] if is_checked",
        "modules = self._modules if is_checked",
        "tests/techniques/remat/test_second_runs.py -k outside_of_the_block",
        "a block that runs twice counts twice in the buffer of another module",
    ),
    Mutant(
        "buffers-of-other-shapes-sent",
        'if not all_same(summed["buffers"]):',
        "if False:",
        "tests/step/test_buffers.py -k hold_differently",
        "a buffer that ranks hold in other shapes is exchanged, and gloo aborts",
    ),
    Mutant(
        "buffers-that-differ-kept",
        'if self._has_equal and not all_same(summed["values of buffers"]):',
        "if False:",
        "tests/step/test_buffers.py -k 'without_a_policy_names_both'",
        "a bias that each rank moves by its own counts differs between ranks",
    ),
    Mutant(
        "counts-of-tp-twice",
        "_wide(self._begin[name]) if counts[self._axis_of(name)] else",
        "_wide(self._begin[name]) if True else",
        "tests/step/test_buffers.py -k 'bit_equal_to_one_process and tp'",
        "tokens count once for each rank of tp",
    ),
    Mutant(
        "counts-of-this-window-alone",
        "write_values(tensor, (_wide(self._begin[name]) + total)",
        "write_values(tensor, total",
        "tests/step/test_buffers.py -k bit_equal_to_one_process",
        "running sums begin at zero in each window",
    ),
    Mutant(
        "tensors-of-attributes-not-named",
        "others = [name for name, is_number in found.items() if not is_number]",
        "others: list[str] = []",
        "tests/step/test_buffers.py -k named_once",
        "a running mean in an attribute follows the forwards of one rank, and training under ranks is another one without a word",
    ),
    Mutant(
        "state-of-holders-stays",
        "        if self.attributes is not None:\n            self.attributes.restore()",
        "        if self.attributes is not None and self.buffers:\n            self.attributes.restore()",
        "tests/model/test_module_state.py -k holds_a_written",
        "after a skipped step a parent takes a cache for filled that was put back",
    ),
    Mutant(
        "tensors-of-attributes-stay",
        "self.attributes = Attributes(module, all_tensors=True)",
        "self.attributes = Attributes(module)",
        "tests/model/test_module_state.py -k without_a_buffer",
        "a trial of the loss, or a skipped step, is counted by a module that keeps a tensor as an attribute",
    ),
    Mutant(
        "second-run-counts-where-no-buffer-is",
        "| changed.keys()",
        "",
        "tests/techniques/remat/test_second_runs.py -k without_a_buffer",
        "a block that counts its forwards in an attribute counts each twice, and its second run goes by the count of the first",
    ),
    Mutant(
        "late-changes-of-attributes",
        "*(_Bindings(module) for module in self._keep_attributes if id(module) not in looked_into),",
        "",
        "tests/techniques/remat/test_second_runs.py -k without_a_buffer",
        "a block that changes an attribute after many forwards runs again with what it has changed",
    ),
    Mutant(
        "iterators-run-on",
        "if self._iterators:",
        "if False:",
        "tests/model/test_module_state.py -k iterator",
        "after a skipped step an iterator in a module goes on from where the skipped forward left it",
    ),
    Mutant(
        "any-mask-cut-by-its-length",
        "if _MASKS.fullmatch(name):",
        'if _MASKS.fullmatch(name) or name.endswith("mask"):',
        "tests/data/test_positions.py -k cannot_be_decided",
        "a mask of frames that happens to be as long as the tokens loses its last frame",
    ),
    Mutant(
        "extremes-drop-nan",
        '.masked_fill_(wide.isnan(), _LEAST if how == "min" else ~_LEAST)',
        "",
        "tests/step/test_buffer_dtypes.py -k every_dtype",
        "whether a NaN stays in the extremes of ranks depends on its sign",
    ),
    Mutant(
        "complex-parts-at-any-byte",
        "part = part.clone()  # one of a pack",
        "part = part  # one of a pack",
        "tests/step/test_buffer_dtypes.py -k every_dtype",
        "a complex buffer that is sent behind another of odd size ends in a raw error",
    ),
    Mutant(
        "expanded-buffers-written",
        "tensor.dtype != values.dtype or _is_expanded(tensor):",
        "tensor.dtype != values.dtype:",
        "tests/step/test_buffer_dtypes.py -k made_in_any_way",
        "a buffer that a forward expands is written in place, which torch refuses",
    ),
    Mutant(
        "sums-set-anew-accepted",
        'self._wrong.setdefault(name, f"sets it anew ({word})")',
        "pass",
        "tests/step/test_buffers.py -k set_anew",
        "counts of the last micro-batches of all ranks are added up, where one process has those of the last",
    ),
    Mutant(
        "sums-watched-in-the-first-windows-only",
        "self.num.bit_count() == 1",
        "self.num <= 2",
        "tests/step/test_buffers.py -k later_is_seen",
        "a forward that zeroes its counts from the fifth call on is never refused",
    ),
    Mutant(
        "decayed-sums-accepted",
        '(word in _ADDS_PRODUCTS and kwargs.get("beta", 1) == 1)',
        "word in _ADDS_PRODUCTS",
        "tests/step/test_buffers.py -k set_anew",
        "a buffer that each forward halves and adds to passes as a sum",
    ),
    Mutant(
        "lists-of-counts-read-unseen",
        'self._wrong.setdefault(name, f"reads it ({word})")',
        "pass",
        "tests/step/test_buffers.py -k 'forward_reads and tolist'",
        "a forward that turns counts into a list goes by those of its own rank",
    ),
    Mutant(
        "ranges-read-unnamed",
        "written = {n for n, b in buffers.items() if self._homes.get(_address(b)) != n} | self._written",
        "written = set()",
        "tests/step/test_buffers.py -k writes_and_reads",
        "a forward goes by the range of its own rank, and nobody is told",
    ),
    Mutant(
        "sums-that-are-read-accepted",
        'elif word not in _SHAPES:\n                self._wrong.setdefault(name, f"computes with it ({word})")',
        "elif False:\n                pass",
        "tests/step/test_buffers.py -k forward_reads",
        "a forward goes by the counts of its own rank",
    ),
    Mutant(
        "all-differences-are-rounding",
        "return bool(((a - b).abs() <= limit *",
        "return bool(((a - b).abs() >= limit *",
        "tests/step/test_buffers.py -k 'within_rounding or hold_differently'",
        "buffers that differ are made equal to rank 0's, and those that differ by rounding are refused",
    ),
    Mutant(
        "padding-rank-compared",
        "if main_is_busy and all_same",
        "if False and all_same",
        "tests/step/test_caches.py -k idle",
        "the last window of an epoch is refused, as a rank without samples has not filled its cache",
    ),
    Mutant(
        "cache-without-its-count",
        "        if not is_same(content_of(part), content):\n            put(part, content)",
        "        pass",
        "tests/step/test_caches.py -k 'skip or put_back'",
        "after a skipped step a cache is zero where its count says that it is filled",
    ),
    Mutant(
        "second-run-with-the-state-of-the-first",
        "        for each in self._attributes:\n            each.restore()\n        outside",
        "        outside",
        "tests/techniques/remat/test_second_runs.py",
        "the second run of a block goes by what the first has counted",
    ),
    Mutant(
        "own-buffer-in-the-shape-of-the-recipe",
        "return self.world.broadcast(found) if of_main and has_own else found",
        "return found",
        "tests/step/test_buffers.py -k saved_from_rank_0",
        "ranks plan other files for a buffer that each has in its own shape",
    ),
    # ---- step: data -----------------------------------------------------------------------------------------------
    Mutant(
        "windows-overlap",
        "self._position = min(self._position + self.global_batch, self._length)",
        "self._position = min(self._position + self.micro_batch, self._length)",
        "tests/data/test_data.py -k 'once_an_epoch or same_windows'",
        "samples are seen several times an epoch",
    ),
    Mutant(
        "one-order-for-all-epochs",
        "sample_order(positions, self._length, seed=self.seed, epoch=epoch)",
        "sample_order(positions, self._length, seed=self.seed, epoch=0)",
        "tests/data/test_data.py -k order_differs",
        "every epoch has the order of the first",
    ),
    Mutant(
        "seed-of-the-new-run",
        'self.epoch, self._position, self.seed = int(state["epoch"]), int(state["position"]), int(state["seed"])',
        'self.epoch, self._position = int(state["epoch"]), int(state["position"])',
        "tests/data/test_data.py tests/state/test_checkpoint.py -k 'resume_under or seed_it_began_with'",
        "a run that is resumed with another seed repeats and misses samples",
    ),
    Mutant(
        "last-window-trained-twice",
        "return self._state_at(*self._ends.get(self._used, (epoch, start + self.global_batch, None))), 0",
        "return self._state_at(epoch, start, None), 0",
        "tests/state/test_resumed_data.py -k 'not_lost or readers_ahead'",
        "a resumed run trains the last window once more",
    ),
    Mutant(
        "window-read-and-lost",
        "return dict(used) if place >",
        "return dict(used) if place <",
        "tests/state/test_resumed_data.py -k 'not_lost or readers_ahead'",
        "a resumed run leaves out windows that were read ahead and not trained",
    ),
    Mutant(
        "mask-off-by-one",
        'labels.masked_fill(batch["attention_mask"][:, 1:] == 0, IGNORED)',
        'labels.masked_fill(batch["attention_mask"][:, :-1] == 0, IGNORED)',
        "tests/data/test_data.py -k cuts_masks",
        "the first padding behind each text is trained on",
    ),
    Mutant(
        "copied-labels-taken",
        "    if not differing:\n",
        "    if differing is None:\n",
        "tests/step/test_labels.py -k not_shifted",
        "a model is trained to copy its input, by labels that were not shifted",
    ),
    Mutant(
        "never-down-to-the-floor",
        "else (done - begin) / max(1, steps - 1 - begin)",
        "else (done - begin) / max(1, steps + 1 - begin)",
        "tests/run/test_build.py -k cosine",
        "the learning rate ends above its floor",
    ),
    Mutant(
        "wsd-without-its-end",
        "(done - begin + 1) / max(1, steps - begin)",
        "(done - begin) / max(1, steps - begin)",
        "tests/run/test_optim.py -k wsd",
        "a warm-up-stable-decay run ends above its floor",
    ),
    Mutant(
        "groups-of-every-name",
        "if any(fnmatchcase(name, pattern) for name in all_names)]",
        "if fnmatchcase(all_names[-1], pattern)]",
        "tests/run/test_optim.py -k 'plain_torch and (groups or sgd)'",
        "a shared parameter is in no group of its first name",
    ),
    Mutant(
        "groups-with-a-later-match",
        "found |= {i: Group(**settings) for i in named if i not in found}",
        "found |= {i: Group(**settings) for i in named}",
        "tests/run/test_optim.py -k 'plain_torch and groups'",
        "the last pattern holds, where the first is said to",
    ),
    Mutant(
        "decay-of-biases",
        'if optim.decay_on == "matrices" and param.dim() < 2:',
        "if False:",
        "tests/run/test_optim.py -k 'plain_torch and (groups or adafactor)'",
        "optim.decay_on=matrices has no effect",
    ),
    Mutant(
        "frozen-and-trained",
        "if param is not None and (id(param) in named) == bool(options.freeze):",
        "if param is not None and id(param) in named:",
        "tests/run/test_optim.py -k 'plain_torch and train'",
        "model.train_only freezes what it names, and trains the rest",
    ),
    # ---- recipe ----------------------------------------------------------------------------------------------------
    Mutant(
        "any-word-for-a-buffer",
        "        _check_buffer(name, buffer)\n",
        "        pass\n",
        "tests/techniques/test_make.py -k end_of_a_window",
        "a recipe sums a buffer over an axis that is not read, or has a policy that does nothing",
    ),
    Mutant(
        "uneven-rows-lost",
        "chunk = -(-part.size // chunks)",
        "chunk = max(1, part.size // chunks)",
        "tests/recipe/test_cuts.py",
        "rows of a tensor that the ranks do not divide are on no rank",
    ),
    Mutant(
        "replicated-parts-cut",
        "low = min(index // part.replicas * chunk, part.size)",
        "low = min(index * chunk, part.size)",
        "tests/recipe/test_cuts.py -k replicas",
        "a part that neighbours hold whole is cut, and no rank has its end",
    ),
    Mutant(
        "last-blocks-alone",
        "if len(groups) > 1 and not full:",
        "if len(groups) > len(blocks):",
        "tests/techniques/data/test_units.py",
        "the last unit is smaller than min_unit_bytes",
    ),
    Mutant(
        "ties-in-two-units",
        "if len(tied) > 1:",
        "if len(tied) > 2:",
        "tests/techniques/data/test_traps_sharding.py -k tied_two_groups",
        "a tied tensor is gathered and reduced in two units",
    ),
    Mutant(
        "ties-by-way-of-others",
        "return freed if freed == blocks else _free_of_outside_ties(anatomy, freed, notes)",
        "return freed",
        "tests/techniques/data/test_units.py",
        "a block tied to one that stays in the root unit is in a unit of its own",
    ),
    Mutant(
        "bytes-as-stored",
        "return fact.numel * DTYPE_BYTES[self.dtype or fact.dtype]",
        "return fact.numel * DTYPE_BYTES[fact.dtype]",
        "tests/techniques/data/test_units.py tests/techniques/test_make.py",
        "units that are gathered in bfloat16 hold half of what was asked for",
    ),
    Mutant(
        "every-other-unit-is-freed",
        "value if i % sharding.reshard_every == 0 else False",
        "value if i % sharding.reshard_every else False",
        "tests/techniques/test_make.py tests/techniques/data/test_units.py",
        "reshard_every keeps the units that it should free",
    ),
    Mutant(
        "prefetch-of-itself",
        "ahead = tuple(names[at + 1 : at + 1 + plan.forward])",
        "ahead = tuple(names[max(at, 0) : max(at, 0) + plan.forward])",
        "'tests/techniques/test_knobs.py::test_a_knob_shows[9-2]'",
        "each unit is gathered ahead of itself, which is too late",
    ),
    Mutant(
        "every-counted-over-all-lists",
        'home = name.rpartition(".")[0]',
        'home = ""',
        "tests/techniques/test_edits.py",
        "Remat(every=2) leaves out other blocks than the second of each list",
    ),
    # ---- config and layout -----------------------------------------------------------------------------------------
    Mutant(
        "unknown-keys-ignored",
        "_refuse_unknown_keys(cls, layer, foreign)\n    _refuse_unwritten",
        "_refuse_unwritten",
        "tests/config/test_loader.py -k unknown",
        "a misspelt key of a configuration has no effect",
    ),
    Mutant(
        "no-hint-for-dotted-keys",
        "return last_parts[found[0]] if found else None",
        "return None",
        "tests/cli/test_main.py -k told_in_a_sentence",
        "a slip such as --steps is not told that train.steps is meant",
    ),
    Mutant(
        "file-before-the-command-line",
        "place[keys[-1]] = value\n    layer.origins[keys] = origin",
        "place.setdefault(keys[-1], value)\n    layer.origins[keys] = origin",
        "tests/config/test_loader.py -k override",
        "what the command line says has no effect where the file says something too",
    ),
    Mutant(
        "last-override-wins",
        "if key in pairs:",
        "if key in ():",
        "tests/config/test_loader.py -k bad_override",
        "of an option given twice the first has no effect",
    ),
    Mutant(
        "origin-of-the-file",
        "place[keys[-1]] = value\n    layer.origins[keys] = origin",
        "place[keys[-1]] = value",
        "tests/config/test_loader.py -k 'origin or override'",
        "a value of the command line is said to come from elsewhere",
    ),
    Mutant(
        "infinite-values-taken",
        "if isinstance(value, float) and not math.isfinite(value):\n        raise",
        "if isinstance(value, float) and value is None:\n        raise",
        "tests/config/test_loader.py tests/config/test_schema.py",
        "a learning rate of .inf or .nan is trained with",
    ),
    Mutant(
        "grid-turned-over",
        "for axis in reversed(AXES):\n            rest, indices[axis] = divmod",
        "for axis in AXES:\n            rest, indices[axis] = divmod",
        "tests/test_layout.py",
        "replicas and shards change places: neighbours hold copies, and shards travel between nodes",
    ),
    Mutant(
        "two-free-axes",
        "if list(degrees.values()).count(-1) > 1:",
        "if list(degrees.values()).count(-1) > 2:",
        "tests/test_layout.py",
        "of two degrees of -1 one stays -1, and the grid has other ranks than there are",
    ),
    # ---- state: weights --------------------------------------------------------------------------------------------
    Mutant(
        "first-holder-writes-all",
        "if holders[turn % len(holders)] == rank:",
        "if holders[0] == rank:",
        "tests/state/test_save.py -k shared_among_them",
        "under replicas one rank writes all, and the others wait",
    ),
    Mutant(
        "block-of-the-beginning",
        "slice(a + b, a + b + n) for a, b, n in zip(local,",
        "slice(a, a + n) for a, b, n in zip(local,",
        "tests/state/test_save.py -k its_own_values",
        "every block of a large tensor is saved with the values of its first",
    ),
    Mutant(
        "overflow-is-written",
        "    if num:\n        largest",
        "    if num < 0:\n        largest",
        "tests/state/test_save.py -k cannot_hold_the_values",
        "weights saved in float16 hold infinities",
    ),
    Mutant(
        "unexpected-names-ignored",
        "if strict and (matched.missing or matched.unexpected):",
        "if strict and matched.missing:",
        "tests/state/test_load.py -k does_not_fit_is_refused",
        "tensors of a file that the model has no place for are left out in silence",
    ),
    Mutant(
        "untied-weights-taken",
        "    refuse_untied(matched, opened, files, boxes)\n",
        "",
        "tests/state/test_load.py -k both_names_of_a_tie",
        "of two different tensors for a tied weight one is lost",
    ),
    Mutant(
        "other-files-on-other-nodes",
        "if len({told[rank].get(ranks) for rank in ranks}) > 1",
        "if len({told[rank].get(ranks) for rank in ranks}) > len(ranks)",
        "tests/state/test_load.py -k read_other_values",
        "replicas that read different files under one name train apart",
    ),
    Mutant(
        "half-loaded-forgotten",
        "memory.half_loaded |= self.names",
        "pass",
        "tests/state/test_load.py -k 'failed_load_left or half_way'",
        "a model that is half old and half new is trained",
    ),
    Mutant(
        "settings-not-taken-over",
        "group.update({key: _as_before(value, group.get(key)) for key, value in wanted.items()})",
        "pass",
        "tests/state/test_optimizer.py -k 'settings_by_the_names or fresh_optimizer'",
        "a loaded optimizer keeps its own learning rates",
    ),
    Mutant(
        "state-by-the-order-of-groups",
        "if theirs & set(names):",
        "if theirs:",
        "tests/state/test_optimizer.py -k settings_by_the_names",
        "groups in another order get each other's learning rates, or are refused",
    ),
    Mutant(
        "rest-of-an-optimizer-dropped",
        "set_rest(self.runtime, self.optim, self._rest)",
        "pass",
        "tests/state/test_optimizer_rest.py -k goes_through",
        "a resumed optimizer counts its steps anew",
    ),
    Mutant(
        "rest-of-an-optimizer-not-in-its-dict",
        "lambda: set_rest(runtime, optim, rest)",
        "lambda: None",
        "tests/state/test_optimizer_rest.py -k goes_through",
        "an optimizer that loads a full state dict counts its steps anew",
    ),
    Mutant(
        "state-beside-the-parameters-taken-for-known",
        'all(values is known["state"][number] for number, values in numbers.items())',
        "True",
        "tests/state/test_optimizer_rest.py -k cannot_be_kept",
        "the moments of an optimizer that another wraps begin at zero after a resume",
    ),
    Mutant(
        "share-of-a-sum-saved",
        "any(placement.is_partial() for placement in value.placements)",
        "False",
        "tests/state/test_optimizer_rest.py -k cannot_be_kept",
        "the state dict of an optimizer has rank 0's share of a sum in place of the sum",
    ),
    # ---- state: checkpoints ----------------------------------------------------------------------------------------
    Mutant(
        "load-through-a-transpose",
        "tensor.nbytes == tensor.untyped_storage().nbytes() and _layout(tensor) == whole",
        "tensor.nbytes == tensor.untyped_storage().nbytes()",
        "tests/state/test_own_state.py -k any_view",
        "what a module's own method writes through a transposed view is not transposed",
    ),
    Mutant(
        "load-by-data-that-is-set",
        "            is_own = now is tensor and trace.is_in_place(HELD + name, now)",
        "            is_own = now is tensor",
        "tests/state/test_own_state.py -k any_view",
        "a module's own method sets weight.data, and nothing is loaded",
    ),
    Mutant(
        "conjugate-taken-for-the-tensor",
        "    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()",
        "    return *place, tensor.dtype",
        "tests/state/test_own_state.py -k any_view",
        "a conjugate is stored, or loaded, as the tensor itself",
    ),
    Mutant(
        "own-methods-on-buffers-of-the-beginning",
        '                self._bare[name] = torch.empty(shape, dtype=dtype, device="meta")',
        "                pass",
        "tests/state/test_own_state.py -k 'as_it_is_now'",
        "a buffer that has grown is cut back where a module answers for its state itself",
    ),
    Mutant(
        "own-length-of-each-rank-in-a-file",
        "        every |= runtime.saved_buffers(of_main=True)",
        "        every |= runtime.saved_buffers()",
        "tests/state/test_own_state.py -k 'as_rank_0_has_it'",
        "ranks plan one file with other lengths of a buffer",
    ),
    Mutant(
        "average-known-by-its-shape",
        "    if marked is not None:\n        runtime, name = marked",
        "    if False:\n        runtime, name = marked",
        "tests/state/test_checkpoint_extra.py -k look_alike",
        "an average of a part is saved as one of another parameter that has its shape on a rank",
    ),
    Mutant(
        "average-of-two-possible-parameters",
        "    if len(by_cuts) > 1:",
        "    if False:",
        "tests/state/test_checkpoint_extra.py -k two_ways",
        "a shard that fits two parameters is saved as the first of them",
    ),
    Mutant(
        "loaded-average-forgets-its-parameter",
        "    return marked_as(made, own)",
        "    return made",
        "tests/state/test_checkpoint_extra.py -k look_alike",
        "an average that was loaded cannot be saved again",
    ),
    Mutant(
        "checksums-not-compared",
        "if sum_of(memory[begin : begin + BLOCK]) != int(sums[number]):",
        "if sum_of(memory[begin : begin + BLOCK]) < 0:",
        "tests/state/test_convert_checkpoint.py -k flipped_bit",
        "a checkpoint with a flipped bit is loaded",
    ),
    Mutant(
        "sums-of-torch-files-not-compared",
        "if end == record.offset + record.size and crc != record.crc:",
        "if end == record.offset + record.size and crc < 0:",
        "tests/state/test_convert.py tests/state/test_load.py -k flipped_bit",
        "a torch file or a DCP directory with a flipped bit is loaded",
    ),
    Mutant(
        "records-that-overlap",
        "if record.offset < end:",
        "if record.offset < 0:",
        "tests/state/test_torch_file.py -k overlap",
        "values of one tensor are read as those of another",
    ),
    Mutant(
        "half-conversions-stay",
        "    finally:\n        staged.close()\n\n\n@dataclass(frozen=True)\nclass _ConversionJob",
        "    finally:\n        pass\n\n\n@dataclass(frozen=True)\nclass _ConversionJob",
        "tests/state/test_convert.py -k stopped",
        "a stopped conversion leaves as many bytes as the model has",
    ),
    Mutant(
        "named-before-it-is-on-disk",
        'sync_folder(self.root)\n            at_fault_point("durable")',
        'at_fault_point("durable")',
        "tests/state/test_checkpoint_disk.py -k on_disk",
        "older checkpoints are removed before the newest would survive a crash",
    ),
    Mutant(
        "manifest-not-on-disk",
        "os.fsync(descriptor)\n            for folder, _, _ in os.walk(self.folder):",
        "pass\n            for folder, _, _ in os.walk(self.folder):",
        "tests/state/test_checkpoint_disk.py -k on_disk",
        "after a crash a checkpoint has its name and no manifest",
    ),
    Mutant(
        "damaged-ones-count",
        "num_last += _is_whole(root / folder_name(step))",
        "num_last += 1",
        "tests/state/test_checkpoint_kept.py -k not_whole",
        "checkpoints that cannot be read are kept in the place of good ones",
    ),
    Mutant(
        "milestones-removed",
        "not (self.every and step % self.every == 0)]",
        "not (self.every and step % self.every)]",
        "tests/state/test_checkpoint.py -k which_checkpoints_stay",
        "keep_every removes what it should keep",
    ),
    Mutant(
        "figures-before-the-save",
        "            fault = error\n",
        "            raise\n",
        "tests/test_said_early.py -k loses_nothing",
        "a missing figure of best= loses what was trained",
    ),
    Mutant(
        "worst-is-best",
        'return -value if self.best.startswith("-") else value',
        "return value",
        "tests/state/test_checkpoint_misuse.py -k best_is_the_least",
        'best="-accuracy" keeps the checkpoint with the least accuracy',
    ),
    Mutant(
        "streams-of-rank-0",
        'set_streams(random["ranks"][world.rank], world.device)',
        'set_streams(random["ranks"][0], world.device)',
        "tests/state/test_checkpoint.py -k uninterrupted",
        "after a resume every rank draws the numbers of rank 0",
    ),
    Mutant(
        "position-not-restored",
        "self.loader.load_state_dict(position)",
        "pass",
        "tests/state/test_checkpoint.py -k uninterrupted",
        "a resumed run begins its epoch anew",
    ),
    Mutant(
        "step-not-restored",
        "runtime_of(self.step.model).step = restored.step",
        "pass",
        "tests/state/test_checkpoint.py tests/state/test_checkpoint_misuse.py -k 'loop_of_ones_own or loaded_first'",
        "a resumed loop of one's own draws the random numbers of its first steps again",
    ),
    Mutant(
        "changed-settings-taken",
        "if refused:\n            raise changed(folder, refused, override)",
        "if refused is None:\n            raise changed(folder, refused, override)",
        "tests/state/test_changed_settings.py -k were_edited",
        "a learning rate that was edited has no effect in a resumed run",
    ),
    Mutant(
        "saved-while-it-changes",
        "return buffer.copy_(tensor, non_blocking=True)",
        "return tensor",
        "tests/state/test_checkpoint.py -k what_was_there_when_save_was_called",
        "a save in the background holds values of several steps",
    ),
    Mutant(
        "acknowledged-before-it-is-written",
        "if is_asked:\n            self.wait()",
        "if is_asked is None:\n            self.wait()",
        "tests/state/test_checkpoint_stop.py -k asked_for",
        "a checkpoint that was asked for is said to be there before it is",
    ),
    Mutant(
        "gaps-summed-as-they-are",
        _SELF + "self._clear_gaps(covered, file)\n",
        "",
        "tests/state/test_block_writer.py",
        "checksums count what an earlier file left in memory, and a good checkpoint is called damaged",
    ),
    # ---- verify ----------------------------------------------------------------------------------------------------
    Mutant(
        "nan-passes",
        "if not difference.err <= allowed:",
        "if difference.err > allowed:",
        "tests/verify/test_verify.py -k nan",
        "a comparison whose differences are NaN says equal",
    ),
    Mutant(
        "rounding-taken-for-noise",
        "allowed = max(gate, 8 * own.get(",
        "allowed = max(gate, 1e-3, 8 * own.get(",
        "tests/verify/test_parity.py -k five_parts",
        "gradients that are wrong by a part in 20,000 are called equal",
    ),
    Mutant(
        "buffers-not-compared",
        "same = torch.equal(step.buffers[name], steps[0].buffers[name])",
        "same = True",
        "tests/verify/test_parity.py -k 'turns_red and stale_buffer'",
        "buffers that differ between ranks are called equal",
    ),
    Mutant(
        "unused-on-one-side",
        "if (value is None) != (reference is None):",
        "if reference is not None and value is None:",
        "tests/verify/test_parity.py -k 'turns_red and unused_as_zero'",
        "zeros in the place of no gradient are called equal",
    ),
    # ---- launch ----------------------------------------------------------------------------------------------------
    Mutant(
        "echo-named-as-the-cause",
        "return min(failures, key=lambda failure: failure.weight)",
        "return max(failures, key=lambda failure: failure.weight)",
        "tests/launch/test_launch_local.py -k echo_was_heard_first",
        "a rank that only lost its peer is named in place of the one that failed",
    ),
    Mutant(
        "ended-without-a-result",
        "rank.failure is None and (rank.code or rank.result is None):",
        "rank.failure is None and rank.code:",
        "tests/launch/test_launch_local.py -k 'exit'",
        "a rank that ends early with status 0 passes for one that is done",
    ),
    Mutant(
        "status-of-a-stopped-job",
        "raise SystemExit(128 + stopped_by)  # it has ended a rank",
        "raise SystemExit(0)  # it has ended a rank",
        "tests/launch/test_launch_local.py -k 'nothing_to_save'",
        "a job that was ended by a signal is taken for one that is done",
    ),
    Mutant(
        "failure-taken-for-a-stop",
        "return not failed and any(map(is_stopped, ranks))",
        "return any(map(is_stopped, ranks))",
        "tests/launch/test_launch_local.py -k asked_to_stop",
        "a rank that fails when the run is asked to stop is not named",
    ),
    # ---- cli -------------------------------------------------------------------------------------------------------
    Mutant(
        "status-of-a-mistake",
        "return 2 if isinstance(error, ConfigError) else 1",
        "return 1",
        "tests/cli/test_main.py -k 'status'",
        "a launcher starts a command again whose options cannot work",
    ),
    Mutant(
        "proof-without-clipping",
        "max_grad_norm=config.train.max_grad_norm,\n        norm_type=config.train.norm_type,\n"
        "        clip_grad_value=config.train.clip_grad_value,\n        fused=config.train.fused,\n    )",
        "norm_type=config.train.norm_type,\n        clip_grad_value=config.train.clip_grad_value,\n        fused=config.train.fused,\n    )",
        "tests/cli/test_train_proof.py -k clips_as_the_run_does",
        "the proof of a run compares another run, which does not clip",
    ),
    Mutant(
        "status-of-ctrl-c",
        "return 130\n    except SystemExit as end:",
        "return 0\n    except SystemExit as end:",
        "tests/cli/test_main.py",
        "a command that was interrupted is taken for one that is done",
    ),
    Mutant(
        "samples-added-to-an-example-are-copies",
        "x % few + few * number if few",
        "x % few if few",
        "tests/techniques/cp/test_proof.py -k repeats_have_values",
        "a mean over samples looks right where they are taken for positions",
    ),
    Mutant(
        "hooks-of-modules-on-rows-unseen",
        "if self._rows is None or not has_backward_hooks(",
        "if True or not has_backward_hooks(",
        "tests/techniques/cp/test_proof.py -k 'backward_hooks_of_modules and up'",
        "a backward hook gets a rank's part of a gradient",
    ),
    Mutant(
        "length-of-the-example-not-run",
        "if own is None or own in self._run_lengths",
        "if True or own in self._run_lengths",
        "tests/techniques/cp/test_proof.py -k 'longer_sequences and 20'",
        "what longer sequences do is not run, though the example is one",
    ),
    Mutant(
        "embeddings-by-frequency-unseen",
        "        if func in _BY_FREQUENCY and not self._is_busy:\n",
        "        if func in _BY_FREQUENCY and False:\n",
        "tests/techniques/cp/test_proof.py -k frequency",
        "an embedding divides gradients by how often a rank looks a row up",
    ),
    Mutant(
        "cp-keys-gradients-not-summed",
        "        grad = Ranks(*ctx.ranks).summed(grad, At(*ctx.saved_tensors), ctx.dim)\n",
        "        grad = grad.index_select(ctx.dim, ctx.saved_tensors[0])\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and plain'",
        "keys and values have the gradients of one rank's queries",
    ),
    Mutant(
        "cp-buffers-of-whole-code-count-on-each-rank",
        '    axes = {True: "dp", False: "loss", None: ""}\n',
        '    axes = {True: "loss", False: "loss", None: ""}\n',
        "tests/techniques/cp/test_buffers.py -k 'tokens and not shard'",
        "what code adds that sees all positions is counted once for each rank of cp",
    ),
    Mutant(
        "cp-buffers-that-do-not-add-up",
        "            found[name] = None if parts else True\n",
        "            found[name] = False if parts else True\n",
        "tests/techniques/cp/test_buffers.py -k otherwise_is_refused",
        "a buffer to which ranks add no parts of what one process adds is summed",
    ),
    Mutant(
        "cp-labels-in-another-order",
        "        return x.index_select(dim, rows if self.ranks.has_rows(x.shape[dim]) else rows[:0])\n",
        "        return x.index_select(dim, rows.flip(0) if self.ranks.has_rows(x.shape[dim]) else rows[:0])\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and plain'",
        "each position is trained on the label of another",
    ),
    Mutant(
        "cp-label-of-a-stand-in",
        "        return x.index_select(dim, rows if self.ranks.has_rows(x.shape[dim]) else rows[:0])\n",
        "        return x.index_select(dim, rows)\n",
        "tests/techniques/cp/test_parity.py -k 'every_length and plain-gather'",
        "a rank without positions trains on the first one again",
    ),
    Mutant(
        "cp-whole-output-on-each-rank",
        "            runtime.share_of_sums /= self._size\n",
        "            pass\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and pooled'",
        "a loss that every rank computes counts once for each of them",
    ),
    Mutant(
        "cp-places-of-another-rank",
        "            places[rows] = i * most + torch.arange(len(rows), device=device)\n",
        "            places[rows] = (len(parts) - 1 - i) * most + torch.arange(len(rows), device=device)\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and plain'",
        "gathered keys stand at the positions of another rank's",
    ),
    Mutant(
        "cp-dropout-equal-on-ranks",
        "        if dim < 0 or self._stream.is_entered:\n",
        "        if True:\n",
        "tests/techniques/cp/test_parity.py -k dropout",
        "ranks drop the same places of their positions",
    ),
    Mutant(
        "cp-stream-goes-on",
        "        with self._stream.entered():\n            return func(*args, **kwargs)\n",
        "        self._stream.enter()\n        return func(*args, **kwargs)\n",
        "tests/techniques/cp/test_parity.py -k dropout",
        "ranks draw other numbers where they must draw equal ones",
    ),
    Mutant(
        "cp-keys-kept-whole",
        "        return x if part is None else _Again(",
        "        return x if part is not None or part is None else _Again(",
        "tests/benchmarks/test_context.py -k share",
        "every rank keeps the keys of all positions for backward",
    ),
    Mutant(
        "cp-rows-of-other-heads",
        "        return swapped.movedim(0, 1).reshape(",
        "        return swapped.flip(0).movedim(0, 1).reshape(",
        "tests/techniques/cp/test_parity.py -k 'test_options and method'",
        "heads come back in another order",
    ),
    Mutant(
        "cp-positions-of-another-call",
        "                if of == kind and at == number:\n",
        "                if of == kind and at == number - 1:\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and rotary'",
        "positions that a block makes are those from 0 on",
    ),
    Mutant(
        "cp-second-run-without-positions",
        "        return args, {**kwargs, **positions, _AT + self.what: at}\n",
        "        return args, {**kwargs, **positions}\n",
        "tests/techniques/cp/test_parity.py -k 'test_options and rotary'",
        "what a block recomputes in backward is of other positions",
    ),
    Mutant(
        "cp-eval-mode-not-proved",
        "modes = (True,) if training.is_like(self._run_whole(trial, is_training=False)) else (True, False)",
        "modes = (True,)",
        "tests/techniques/cp/test_proof.py -k code_behind",
        "an evaluation is of code that was not compared",
    ),
    Mutant(
        "cp-second-length-not-run",
        "        again = self._facts(trial, plan, facts)\n",
        "        again = facts\n",
        "tests/techniques/cp/test_proof.py -k longer",
        "code that longer sequences take is not compared",
    ),
    Mutant(
        "cp-mixed-output-taken",
        "    if len(found) > 1:\n        raise Differs",
        "    if len(found) > 9:\n        raise Differs",
        "tests/techniques/cp/test_proof.py -k code_behind",
        "a number that every rank has counts once for each of them",
    ),
    Mutant(
        "cp-what-is-kept-not-compared",
        "        ends.append((f\"what is kept in {name or 'the model'}\", mine, full))\n",
        "",
        "tests/techniques/cp/test_proof.py -k code_behind",
        "a loss that is kept in an attribute is of one rank's positions",
    ),
    Mutant(
        "cp-samples-not-compared",
        "        self._check_inputs(args, kwargs)\n",
        "",
        "tests/techniques/cp/test_parity.py -k other_samples",
        "an evaluation joins the positions of other samples",
    ),
    Mutant(
        "cp-entry-cut-by-its-size",
        "not alike or self._of_positions.get(key) is False",
        "not alike",
        "tests/techniques/cp/test_parity.py -k two_outputs",
        "weights of samples are cut as positions where there are as many of both",
    ),
    Mutant(
        "cp-gradient-of-an-input",
        "        self._refuse_trained(given)\n",
        "",
        "tests/techniques/cp/test_parity.py -k 'refused and prompt'",
        "a prompt that is trained gets the gradient of a rank's positions",
    ),
    Mutant(
        "cp-more-arguments-taken",
        "        if more or not isinstance(source, Tensor):\n",
        "        if not isinstance(source, Tensor):\n",
        "tests/techniques/cp/test_parity.py -k refused",
        "an argument that was not tried goes its own way",
    ),
    Mutant(
        "cp-factor-of-one-rank",
        "        return with_gathered(compute, (factor,), (dim,), self._at, self._cuts.ranks)\n",
        "        return compute(factor)\n",
        "tests/techniques/cp/test_written_out.py -k 'parity and alibi'",
        "attention that is written out looks at the keys of one rank",
    ),
    Mutant(
        "cp-factor-of-another-call",
        'dim = dim_of(self._products, self._numbers.take("product"))',
        'dim = dim_of(self._products, self._numbers.take("product") - 1)',
        "tests/techniques/cp/test_written_out.py -k 'parity and alibi'",
        "queries are gathered in the place of keys",
    ),
    Mutant(
        "cp-factor-not-compared",
        '        self._compare(frame.name, "what it multiplies with", factor, full)\n',
        "",
        "tests/techniques/cp/test_written_out.py -k only_looks",
        "keys that are made of the local length are taken for those of the whole",
    ),
    Mutant(
        "cp-made-keys-of-one-rank",
        "        return map_keyed(lambda path, x: gathered(x, at, cuts.ranks, dims[path]) if path in dims else x, output)\n\n",
        "        return output\n\n",
        "tests/techniques/cp/test_written_out.py -k 'parity and checked'",
        "keys that a layer makes are those of one rank",
    ),
    Mutant(
        "cp-triangle-of-the-first-rows",
        "        return full.index_select(-2, rows.to(full.device))\n",
        "        return full[..., : len(rows), :]\n",
        "tests/techniques/cp/test_written_out.py -k 'proved and tril'",
        "queries see what the first positions see",
    ),
    Mutant(
        "cp-all-positions-returned",
        '                        raise Differs(name, "what it returns is of all positions, and not of this rank\'s")\n',
        "                        pass\n",
        "tests/techniques/cp/test_written_out.py -k would_return",
        "a block runs on the whole sequence on every rank without a word",
    ),
    Mutant(
        "cp-island-on-rows",
        "lambda path, x: gathered(x, at, cuts.ranks, inputs[path]) if path in inputs else x, (args, kwargs)",
        "lambda path, x: x, (args, kwargs)",
        "tests/techniques/cp/test_parity.py -k 'test_models and token'",
        "a module that mixes positions mixes those of one rank",
    ),
    Mutant(
        "cp-not-joined",
        "        return map_keyed(lambda path, x: self.joined(x, dims[path], at) if path in dims else x, output)\n",
        "        return output\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and pooled'",
        "a pooled output is of one rank's positions",
    ),
    Mutant(
        "cp-masks-of-the-first-rows",
        "        return of_positions(batch, head, rows[query], key)\n",
        "        return of_positions(batch, head, query, key)\n",
        "tests/techniques/cp/test_parity.py -k rows_alone",
        "queries see what the first positions see",
    ),
    Mutant(
        "cp-mask-not-cut",
        "    return mask.index_select(-2, rows)\n",
        "    return mask[..., : rows.shape[0], :]\n",
        "tests/techniques/cp/test_parity.py -k 'test_models and packed'",
        "queries see what the first positions see",
    ),
    Mutant(
        "cp-causal-from-the-first-row",
        "    return rows[:, None] >= torch.arange(keys.shape[-2], device=rows.device)\n",
        "    return torch.arange(rows.shape[0])[:, None] >= torch.arange(keys.shape[-2], device=rows.device)\n",
        "tests/techniques/cp/test_proof.py -k 'what_is_proved and plain'",
        "queries see what the first positions see",
    ),
    Mutant(
        "cp-keys-not-compared",
        '            self._compare(frame.name, "what its attention takes for keys", call.k, keys)\n',
        "",
        "tests/techniques/cp/test_proof.py -k broken",
        "keys that are turned by other positions pass",
    ),
    Mutant(
        "cp-outputs-of-modules-not-compared",
        "        if frame.is_right and name not in self._plan.unjudged:\n",
        "        if frame.is_right and not name:\n",
        "tests/techniques/cp/test_proof.py -k 'named_or_runs and shift'",
        "the module that mixes positions is not named",
    ),
    Mutant(
        "cp-a-small-difference-allowed",
        "_ALLOWED = 1e-11  #",
        "_ALLOWED = 10.0  #",
        "tests/techniques/cp/test_proof.py -k named_or_runs",
        "a module that mixes positions is cut",
    ),
    Mutant(
        "cp-heads-not-in-parts",
        "        parts = zip(q.chunk(num, 1), k.chunk(num, 1), v.chunk(num, 1), strict=True)\n",
        "        parts = [(q, k, v)]\n",
        "tests/techniques/cp/test_proof.py -k learned_for_each_head",
        "a number for each head is applied to other heads",
    ),
    Mutant(
        "cp-other-blocks-not-run",
        "            self._hold_for_all(facts, kinds)\n",
        "",
        "tests/techniques/cp/test_proof.py -k many_blocks",
        "what only later blocks do is not compared",
    ),
    Mutant(
        "cp-gates-as-they-are",
        "        _shift_values(trial)\n",
        "",
        "tests/techniques/cp/test_proof.py -k gate",
        "what a gate of 0 lets through after the first step is not compared",
    ),
    Mutant(
        "sp-samples-dropped-by-rank",
        "        if dim < 0 or self._stream.is_entered:\n",
        "        if self._stream.is_entered:\n",
        "tests/techniques/tp/test_sequence.py -k follows_from",
        "channels of a sample are left out of some of its positions",
    ),
    Mutant(
        "sp-rows-dropped-by-what-is-around",
        "        dim = running.dims[number] if number < len(running.dims) else None\n",
        "        dim = -1 if not running.name else running.dims[number] if number < len(running.dims) else None\n",
        "tests/techniques/tp/test_sequence.py -k follows_from",
        "rows between blocks are dropped alike, and by as many numbers as each rank has of them",
    ),
    Mutant(
        "sp-channels-taken-for-rows",
        "most = 2 if func in _OF_FEATURES",
        "most = 9 if func in _OF_FEATURES",
        "tests/techniques/tp/test_sequence.py -k follows_from",
        "channels are left out of some positions of a sample",
    ),
    Mutant(
        "sp-unseen-dropout-taken",
        "        if dim is None or (dim >= 0",
        "        if dim is not None and (dim >= 0",
        "tests/techniques/tp/test_sequence.py -k 'refused and another'",
        "dropout that the proof has not seen draws as if every rank had all positions",
    ),
    Mutant(
        "sp-mixed-dropout-taken",
        "        if facts.draws and -2 in dims:\n",
        "        if False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k drops_rows",
        "what has no positions is dropped by the numbers of a rank",
    ),
    Mutant(
        "sp-one-position-cut-twice",
        '        return any(node.there != "gather" for node in first_nodes(x, "MovedBackward"))\n',
        "        return False\n",
        "tests/techniques/tp/test_sequence.py -k 'single_models and streams'",
        "gradients of sequences of one position count twice",
    ),
    Mutant(
        "sp-stand-in-of-zeros",
        "        if is_gradient or self._replace(rank=self.size - 1).has_rows(at.length):",
        "        if True:",
        "tests/techniques/tp/test_sequence.py -k 'single_models and eps'",
        "a norm of no numbers is not a number",
    ),
    Mutant(
        "cp-stand-in-of-zeros",
        "        if is_gradient or self._replace(rank=self.size - 1).has_rows(at.length):",
        "        if True:",
        "tests/techniques/cp/test_parity.py -k stands_for",
        "a norm of no numbers is not a number",
    ),
    Mutant(
        "sp-joined-before-it-was-written",
        "            if joined is x and version == _version(x):\n",
        "            if joined is x:\n",
        "tests/techniques/tp/test_sequence.py -k 'single_models and place'",
        "a layer's gradient goes past what the stream was written with before it",
    ),
    Mutant(
        "sp-what-ranks-have-meets-rows",
        "            if any(label.is_whole and x.is_floating_point() for x, label in of_given):\n",
        "            if False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k meet_rows",
        "a number that all ranks have gets the gradient of one rank's positions",
    ),
    Mutant(
        "proof-backward-not-run",
        "            if found is None:\n                self._compare_gradients(trial, plan)\n",
        "            pass\n",
        "tests/techniques/cp/test_proof.py -k no_value_shows",
        "a backward that depends on all positions gets those of a rank",
    ),
    Mutant(
        "proof-keeps-its-graphs",
        "                mode.gradients.end()\n",
        "                pass\n",
        "tests/techniques/cp/test_proof.py -k keeps_no_tensors",
        "each proof keeps its activations for good",
    ),
    Mutant(
        "proof-hidden-in-eval-mode",
        "cuts_off = self._trial.module.training and any(",
        "cuts_off = any(",
        "tests/techniques/cp/test_proof.py -k searched_once",
        "all blocks of a deep model are run with their graphs: 23 GB for the shapes of 70B",
    ),
    Mutant(
        "proof-sums-of-gradients-not-compared",
        "            self._left[place] = self._left.get(place, full) - grad\n",
        "            self._left[place] = grad * 0\n",
        "tests/techniques/cp/test_proof.py -k 'no_value_shows and weight'",
        "a weight's gradient is divided by the length of a rank's rows",
    ),
    Mutant(
        "proof-gradients-of-rows-not-compared",
        "            is_wrong = rows is None or self._is_off(place, grad - rows, rows)\n",
        "            is_wrong = rows is None\n",
        "tests/techniques/cp/test_proof.py -k 'no_value_shows and straight'",
        "straight-through code gives a position the gradients of a rank's others",
    ),
    Mutant(
        "proof-thresholds-of-gradients-not-met",
        "_SCALES = (1.0, 1e-4, 1e8, 0.0)",
        "_SCALES = (1.0, 0.0)",
        "tests/techniques/tp/test_sequence_proof.py -k 'ones_own and threshold'",
        "a hook that changes large gradients goes by the norm of a rank's part",
    ),
    Mutant(
        "proof-gradients-out-of-nothing",
        "_SCALES = (1.0, 1e-4, 1e8, 0.0)",
        "_SCALES = (1.0, 1e-4, 1e8)",
        "tests/techniques/tp/test_sequence_proof.py -k 'ones_own and sum'",
        "a rank without positions adds a loss of the position that stands for them",
    ),
    Mutant(
        "proof-gradients-that-do-not-arrive",
        "                grad = torch.zeros_like(self._full[place])\n",
        "                continue\n",
        "tests/techniques/cp/test_gradients.py -k 'ends and at'",
        "where no rank gives a gradient, one of all positions is not missed",
    ),
    Mutant(
        "proof-weights-of-layers-not-compared",
        "        return y * self._weights[key]\n",
        "        return y\n",
        "tests/techniques/cp/test_gradients.py -k 'detached and layer'",
        "a layer of what has no gradient trains on a rank's positions",
    ),
    Mutant(
        "proof-hidden-gradients-in-many-blocks",
        '                self._whole.hides.add(self.frames[-1].name if self.frames else "")\n',
        "                pass\n",
        "tests/techniques/cp/test_gradients.py -k hide",
        "a block that goes by its number trains on a rank's positions",
    ),
    Mutant(
        "proof-long-examples-tried-short",
        "given if given <= _MOST_OWN else _OF_LONGER)",
        "min(given, 9))",
        "tests/techniques/cp/test_gradients.py -k last",
        "what is done on longer sequences is not proved",
    ),
    Mutant(
        "proof-whole-outputs-get-all-gradients",
        "        share = self.num_ranks if full.shape == x.shape else 1\n",
        "        share = 1\n",
        "tests/techniques/cp/test_proof.py -k 'what_is_proved and pooled'",
        "what every rank computes is refused: its gradient would count once for each rank",
    ),
    Mutant(
        "proof-checkpoints-run-again",
        "        if kind is CheckpointFunction:  # nothing is run again in the backward\n",
        "        if False:\n",
        "tests/techniques/cp/test_proof.py -k reentrant",
        "a checkpoint of the model's own cannot be cut",
    ),
    Mutant(
        "proof-without-gradients",
        "has_gradients=trial.module.training, then=mode.run_backward",
        "has_gradients=False, then=mode.run_backward",
        "tests/techniques/tp/test_sequence_proof.py -k 'ones_own and hook'",
        "code that runs with gradients alone is not run in the proof",
    ),
    Mutant(
        "sp-script-not-seen",
        "            self._label(plain, [*args, *kwargs.values()], result)\n",
        "            pass\n",
        "tests/techniques/tp/test_sequence_proof.py -k 'ones_own and script'",
        "the gradient of a parameter in torch.jit.script is that of a rank's positions",
    ),
    Mutant(
        "sp-vmap-taken",
        "        if params and in_transform() and self._may_be_of_rows():\n",
        "        if False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k 'ones_own and vmap'",
        "the gradient of a parameter in torch.vmap is that of a rank's positions",
    ),
    Mutant(
        "sp-written-views-not-seen",
        "            if x._base is not None and any(x is each for each, _ in of_given):  # a view was written\n",
        "            if False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k 'ones_own and views'",
        "the gradient of what meets a tensor that is written in parts is that of a rank's positions",
    ),
    Mutant(
        "sp-late-branch-not-compared",
        '                runtime.compared["tp"] = "leave sequence_parallel out"\n',
        "                pass\n",
        "tests/techniques/tp/test_sequence.py -k 'what_is_refused and graph'",
        "a parameter that the example did not use trains on a rank's positions until the next comparison",
    ),
    Mutant(
        "tp-whole-uses-count-as-parts",
        "    return tuple(grad / size if i in places and",
        "    return tuple(grad if i in places and",
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-False-hows0-options0]'",
        "a penalty in the loss on the norm of each head counts once for each rank",
    ),
    Mutant(
        "tp-share-of-a-backward-stays",
        "            backward.until_end.callback(handle.remove)\n",
        "",
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-False-hows0-options0]'",
        "a second backward through the same graph takes a share of the share",
    ),
    Mutant(
        "tp-value-used-both-ways-shared",
        "                if len(sides) > 1 or node is None:\n",
        "                if node is None:\n",
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-False-hows0-options0]'",
        "a value of a parameter that layers use, and a loss too, has a share of the layers' gradient",
    ),
    Mutant(
        "tp-part-taken-for-all",
        '            if name in self._cut:\n                if "whole" in sides:',
        "            if name in self._cut:\n                if False:",
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-False-hows0-options0]'",
        "a loss of what a hook has seen of a rank's heads is taken for one of all heads",
    ),
    Mutant(
        "tp-part-of-a-whole-gradient-taken",
        '                if "part" in sides:\n',
        "                if False:\n",
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-False-hows0-options0]'",
        "a branch that the example did not take gives ranks other gradients of a parameter, which drifts apart",
    ),
    Mutant(
        "tp-exchange-of-another-side-taken",
        '        self._is_mixed |= side not in (expected, "unknown")\n',
        "",
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-False-hows0-options0]'",
        "a loss of what a layer that is not trained has computed of a rank's heads is taken for one of all heads",
    ),
    Mutant(
        "sp-rows-taken-for-whole",
        '"whole" if there == "rows" else "part"',
        '"whole"',
        "'tests/techniques/tp/test_past_regions.py::test_it_counts_once_or_is_refused[tp=2-True-hows1-options1]'",
        "gradients of norms on a rank's positions are divided by the number of ranks",
    ),
    Mutant(
        "rows-operators-not-seen",
        "is_own=is_of_operator(kind) or is_users_hook(kind)",
        "is_own=is_users_hook(kind)",
        "tests/techniques/tp/test_sequence_proof.py -k 'operator and threshold'",
        "a custom operator whose backward looks at all positions trains on those of a rank",
    ),
    Mutant(
        "rows-outputs-as-they-become",
        "                self._whole.outputs[frame.key] = with_own_containers(output)\n",
        "                self._whole.outputs[frame.key] = output\n",
        "tests/techniques/tp/test_sequence.py -k towers",
        "a model that writes into what a part of it returned, as CLIP does, is refused",
    ),
    Mutant(
        "cp-latents-dropped-by-rank",
        "        is_of_rank = number in self._queries or self._cuts.exchange is attend_over_heads\n",
        "        is_of_rank = True\n",
        "tests/techniques/cp/test_parity.py -k 'attention_follows and latents'",
        "latents, which all ranks have, are others on each of them",
    ),
    Mutant(
        "cp-memory-dropped-alike",
        "        is_of_rank = number in self._queries or self._cuts.exchange is attend_over_heads\n",
        "        is_of_rank = number in self._of_rows\n",
        "tests/techniques/cp/test_parity.py -k 'attention_follows and memory'",
        "positions that look at a memory are dropped alike on all ranks",
    ),
    Mutant(
        "nested-proof-left-out",
        "                _refuse_cut_again(module, layout, search, inner)\n",
        "                pass\n",
        "tests/techniques/tp/test_nested.py -k either_cut",
        "a model whose rows cannot be cut twice is trained",
    ),
    Mutant(
        "nested-rows-of-whole-sequences",
        "        return length if outer is None else outer.rows.shape[0]\n",
        "        return length\n",
        "tests/techniques/tp/test_nested.py -k 'lengths and inline'",
        "a rank's rows are cut as if they were all positions",
    ),
    Mutant(
        "nested-dropout-of-one-cut",
        "RowDrops(module, dims, self, stream, what=",
        "RowDrops(module, {name: [-1] * 9 for name in dims}, self, stream, what=",
        "tests/techniques/tp/test_nested.py -k dropout_of_rows",
        "ranks of tp drop the same places of the rows of cp",
    ),
    Mutant(
        "described-bytes-of-half",
        "        numbers = 2 * data.moved * (degree - 1)",
        "        numbers = data.moved * (degree - 1)",
        "tests/techniques/cp/test_described.py -k bytes",
        "describe says half of the bytes that sequence parallelism sends",
    ),
    Mutant(
        "described-work-of-all-positions",
        "    keys = (positions + 1).double()\n",
        "    keys = (torch.arange(positions.shape[1])[None] + 1).double()\n",
        "tests/techniques/cp/test_described.py -k documents",
        "packed documents are said to be even over the ranks",
    ),
    Mutant(
        "sp-norms-not-summed",
        '    facts["partial"] = list(dict.fromkeys([*facts["partial"], *on_rows]))\n',
        "",
        "tests/techniques/tp/test_sequence.py -k 'test_models and inline'",
        "norms differ from rank to rank",
    ),
    Mutant(
        "sp-whole-gradient-summed",
        '        whole = moved(x, at, self.ranks, dim, "gather", "rows")\n',
        '        whole = moved(x, at, self.ranks, dim, "gather", "sum")\n',
        "tests/techniques/tp/test_sequence.py -k 'test_models and inside'",
        "gradients of a norm in front of cut layers count once for each rank",
    ),
    Mutant(
        "sp-part-of-a-gradient-taken-for-all",
        'ctx.ranks, ctx.dim, "sum", "gather", True), *[None] * 5',
        'ctx.ranks, ctx.dim, "rows", "gather", True), *[None] * 5',
        "tests/techniques/tp/test_sequence.py -k 'test_models and inline'",
        "layers get the gradient of one rank's heads",
    ),
    Mutant(
        "sp-stand-in-counts",
        "        return torch.zeros_like(x) if is_gradient and not ranks.has_rows(at.length) else x\n",
        "        return x\n",
        "tests/techniques/tp/test_sequence.py -k 'every_length and shift'",
        "a rank without positions trains on the first one again",
    ),
    Mutant(
        "sp-start-not-gathered",
        '        return moved(x, at, self.ranks, dim, "rows", "gather")\n',
        "        return x.index_select(dim, at.rows)\n",
        "tests/techniques/tp/test_sequence.py -k 'test_models and inline'",
        "embeddings have the gradient of one rank's positions",
    ),
    Mutant(
        "sp-arguments-without-positions-not-summed",
        "lambda path, x: SumGradient.apply(x, group) if path in parts else x, given",
        "lambda path, x: x, given",
        "tests/techniques/tp/test_sequence.py -k 'test_models and condition'",
        "what conditions a block has the gradient of one rank's positions",
    ),
    Mutant(
        "sp-dropout-equal-on-ranks",
        "        if dim < 0 or self._stream.is_entered:\n",
        "        if True:\n",
        "tests/techniques/tp/test_sequence.py -k dropout_differs",
        "masks repeat along the positions",
    ),
    Mutant(
        "sp-layers-on-rows-taken",
        "            elif is_rows or x.shape != shape:\n",
        "            elif False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k 'sites and inline'",
        "sums over ranks mix positions",
    ),
    Mutant(
        "sp-whole-beside-rows-taken",
        "            if any(label.is_whole and x.is_floating_point() for x, label in of_given):\n",
        "            if False:\n",
        "tests/techniques/tp/test_sequence.py -k 'test_models and condition'",
        "a number that all ranks have gets the gradient of one rank's positions",
    ),
    Mutant(
        "sp-two-ways-taken",
        "            if name in self.cut or (name in facts.with_whole and name not in self._free):\n",
        "            if False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k 'sites or elsewhere'",
        "a parameter's whole gradient counts once for each rank",
    ),
    Mutant(
        "sp-buffers-not-compared",
        "            elif not _is_equal(x, self._whole.buffers.get(name)):\n",
        "            elif False:\n",
        "tests/techniques/tp/test_sequence_proof.py -k 'sites and counts'",
        "a buffer counts one rank's positions",
    ),
    Mutant(
        "sp-left-out-block-taken",
        "        if self.is_cut and self.at is None:\n",
        "        if False:\n",
        "tests/techniques/tp/test_sequence.py -k 'refused and left'",
        "ranks gather logits of other positions: one of them crashes",
    ),
    Mutant(
        "cp-losses-of-pairs-taken",
        "        _check_positions(runtime, loss, output, batch, mine, sums)\n",
        "        pass\n",
        "tests/techniques/cp/test_parity.py -k refused",
        "a loss that compares positions is another on parts of a sample",
    ),
    Mutant(
        "cp-other-flags-taken",
        "            if repr(x) != self._constants.get(path, repr(default)):\n",
        "            if False:\n",
        "tests/techniques/cp/test_parity.py -k refused",
        "a flag that was not tried takes its own way",
    ),
    Mutant(
        "cp-rows-of-an-older-value",
        "            if seen is None or seen[1] != version:\n",
        "            if seen is None:\n",
        "tests/techniques/cp/test_parity.py -k in_place",
        "a block gets what an argument was before it was changed in place",
    ),
    Mutant(
        "cp-rows-of-another-length",
        "            if dim is None or (path in on_rows and x.shape[dim] == num and (num != at.length or self.is_on_rows(x))):\n",
        "            if dim is None or x.shape[dim] == num != at.length:\n",
        "tests/techniques/cp/test_parity.py -k refused",
        "a sequence as long as a rank's part of another is taken for it",
    ),
    Mutant(
        "cp-own-checkpoints-taken",
        "        if node.name() == name:\n",
        "        if False:\n",
        "tests/techniques/cp/test_parity.py -k refused",
        "what a model's own checkpoint runs again sees one rank's keys",
    ),
    Mutant(
        "tp-input-gradient-not-summed",
        "return SumParts.apply(grad, ctx.group), None",
        "return grad, None",
        "tests/techniques/tp/test_parity.py -k gpt2-tp",
        "what lies before a column-parallel layer is trained by the gradients of a part",
    ),
    Mutant(
        "tp-outputs-not-summed",
        "        return sum_over(x, group)\n",
        "        return x.clone()\n",
        "tests/techniques/tp/test_parity.py -k gpt2-tp",
        "a row-parallel layer gives each rank's part for the whole",
    ),
    Mutant(
        "tp-bias-on-each-rank",
        "y = y if bias is None else y + bias\n",
        "y = y if bias is None else y + 2 * bias\n",
        "tests/techniques/tp/test_parity.py -k gpt2-tp",
        "a bias is added once for each rank",
    ),
    Mutant(
        "tp-partial-gradients-not-summed",
        'runtime.partial.setdefault("tp", []).extend(trained)',
        "pass",
        "tests/techniques/tp/test_parity.py -k qwen3-tp",
        "norms of queries and keys have the gradients of a rank's heads",
    ),
    Mutant(
        "tp-shared-parts-not-summed",
        "if sum(box in other for other in held) > 1",
        "if sum(box in other for other in held) > 2",
        "tests/techniques/tp/test_parity.py -k qkv-kv-1-dp_shard",
        "a key/value head that several ranks hold is trained by the queries of one",
    ),
    Mutant(
        "tp-sums-over-the-wrong-ranks",
        "Shared(group_name(axis.group),",
        'Shared(group_name(world.axis("dp").group or axis.group),',
        "tests/techniques/tp/test_parity.py -k the_reference",
        "activations of ranks with other data are summed",
    ),
    Mutant(
        "tp-argument-gradient-not-summed",
        "value, cut = shared.sum_gradient(value), cuts[place]",
        "value, cut = value, cuts[place]",
        "tests/techniques/tp/test_parity.py -k steered",
        "what a module is given beside its layers is trained by a part",
    ),
    Mutant(
        "tp-gathered-gradient-not-summed",
        "grad = SumParts.apply(grad, ctx.group) if ctx.has_part else grad",
        "grad = grad",
        "tests/techniques/tp/test_parity.py -k norm-of-width",
        "queries before a norm over the full width are trained by a rank's part",
    ),
    Mutant(
        "tp-equal-masks-on-parts",
        "self._axis, *place[1:], self._index)",
        "self._axis, *place[1:], 0)",
        "tests/techniques/tp/test_dropout.py -k masks_are_equal",
        "dropout repeats its masks along the features",
    ),
    Mutant(
        "tp-computed-weights-not-summed",
        "partial = list(originals or ())",
        "partial: list[str] = []",
        "tests/techniques/tp/test_parity.py -k weight-norm",
        "parameters that a weight is computed from are trained by the gradients of a part",
    ),
    Mutant(
        "tp-other-data-unnoticed",
        "if not float(summed):",
        "if True:",
        "tests/techniques/tp/test_misuse.py -k other",
        "ranks that share layers work on other data",
    ),
    Mutant(
        "tp-rows-not-summed",
        "return self._shared.sum_parts(rows)",
        "return rows",
        "tests/techniques/tp/test_vocabulary.py -k untied",
        "an embedding gives zeros for the tokens of other ranks",
    ),
    Mutant(
        "tp-padding-row-trained",
        "padding = padding if padding is not None and 0 <= padding < num_rows else None",
        "padding = None",
        "tests/techniques/tp/test_vocabulary.py -k padding",
        "the row of the padding token is trained",
    ),
    Mutant(
        "tp-rows-of-an-even-vocabulary",
        "first = -(-num_tokens // axis.size) * axis.rank\n        padding_idx",
        "first = num_tokens // axis.size * axis.rank\n        padding_idx",
        "tests/techniques/tp/test_vocabulary.py -k untied",
        "tokens are looked up one row beside theirs where the vocabulary is uneven",
    ),
    Mutant(
        "tp-head-gradient-not-summed",
        "            x = self._shared.sum_gradient(x)\n            if compute is not None:\n                if self._shared.stream",
        "            if compute is not None:\n                if self._shared.stream",
        "tests/techniques/tp/test_vocabulary.py -k untied",
        "the model is trained by the logits of a rank's tokens",
    ),
    Mutant(
        "tp-table-that-is-read-elsewhere",
        "    if weight in trial.read:\n",
        "    if False:\n",
        "tests/techniques/tp/test_vocabulary.py -k Penalised",
        "a penalty on the embedding is that of a rank's rows",
    ),
    Mutant(
        "tp-bias-that-is-read-elsewhere",
        "    if bias in trial.read or len(of_bias) > 1:\n        return f",
        "    if False:\n        return f",
        "tests/techniques/tp/test_vocabulary.py -k BiasRead",
        "the head's bias is used whole where a rank has a part",
    ),
    Mutant(
        "tp-indices-taken-for-zeros",
        "with example.within(), forked_streams(0, None, {}):",
        "with forked_streams(0, None, {}):",
        "tests/techniques/tp/test_other_uses.py -k on_meta",
        "a model on meta is tried with zeros for its masks and orders",
    ),
    Mutant(
        "tp-uses-in-later-blocks-unnoticed",
        "whole.gradients.strays or _used_elsewhere(trial, regions) or _differs",
        "_differs",
        "tests/techniques/tp/test_other_uses.py -k LastIsRead",
        "a number that a later block's region uses and others too has its gradient counted twice",
    ),
    Mutant(
        "tp-uses-elsewhere-unnoticed",
        "        _used_elsewhere(trial, region)\n        or _inner_differ",
        "        _inner_differ",
        "tests/techniques/tp/test_other_uses.py -k Gate",
        "outputs that a region has whole and others use too have their gradient counted twice",
    ),
    Mutant(
        "tp-search-draws-from-the-run",
        "with example.within(), forked_streams(0, None, {}):",
        "with example.within():",
        "tests/techniques/tp/test_misuse.py -k draws_the_same",
        "the rank that searches goes on with other random numbers than the others",
    ),
    Mutant(
        "tp-outputs-that-are-views",
        ".movedim(0, dim).detach()  # not a view: see SumGradient",
        ".movedim(0, dim)",
        "tests/techniques/tp/test_parity.py -k in-place",
        "a model cannot change its gathered logits in place",
    ),
    Mutant(
        "tp-forwards-of-other-inputs-unnoticed",
        "    if float(smallest) == -float(largest):\n        return\n",
        "    if float(smallest) == -float(largest) or inputs:\n        return\n",
        "tests/techniques/tp/test_misuse.py",
        "evaluations, generate and loops outside of windows work on other data along tp",
    ),
    Mutant(
        "tp-torchs-clipping-unnoticed",
        "            raise refusal(name, part)\n        mark_part(each,",
        "            return result\n        mark_part(each,",
        "tests/techniques/tp/test_misuse.py",
        "torch clips each rank by the norm of its own parts",
    ),
    Mutant(
        "tp-kept-functions-not-copied",
        "            kept[key] = rebound(function, memo)",
        "            pass",
        "tests/techniques/tp/search/test_cut_search.py -k keep",
        "a function that a module keeps runs the modules of the original",
    ),
    Mutant(
        "tp-scattered-gradient-of-a-part",
        "        return Gather.apply(grad, ctx.group, ctx.size, ctx.rank, ctx.dim, False), None, None, None, None",
        "        return grad.repeat_interleave(ctx.size, ctx.dim), None, None, None, None",
        "tests/techniques/tp/test_by_hand.py",
        "a parameter that is kept whole has the gradient of a part",
    ),
    Mutant(
        "kept-parameters-unnoticed",
        "    if id(param) in kept:",
        "    if name in kept:",
        "tests/parallel/test_unfit.py -k keeps",
        "a parameter that a function keeps is replaced, and gets no gradient",
    ),
    Mutant(
        "frames-looked-at-while-garbage-is-collected",
        "        gc.disable()\n        try:\n            yield\n",
        "        try:\n            yield\n",
        "tests/world/test_waiting.py",
        "on Python 3.11 a rank crashes now and then",
    ),
    Mutant(
        "grouped-product-of-the-wrong-expert",
        "*(a[start:end] @ b[i] for i, (start, end) in enumerate(groups)), rest])",
        "*(a[start:end] @ b[-i] for i, (start, end) in enumerate(groups)), rest])",
        "tests/model/test_lift.py",
        "experts are compared by other products than the model's",
    ),
    Mutant(
        "tp-blocks-that-are-else-unnoticed",
        "whole.gradients.strays or _used_elsewhere(trial, regions) or _differs(trial, regions, degree, whole):",
        "whole.gradients.strays or _used_elsewhere(trial, regions):",
        "tests/techniques/tp/test_other_uses.py -k LastIsElse",
        "what two blocks show is done to a third that is used in another way",
    ),
    Mutant(
        "tp-backward-of-later-blocks-unnoticed",
        "                self.strays |= cut is None\n",
        "",
        "tests/techniques/tp/test_places.py -k inside-cut-True",
        "a parameter that later blocks use between their layers has a part of its gradient on each rank",
    ),
    Mutant(
        "tp-hooks-of-later-blocks-unnoticed",
        "if any({*uses.get(weight, ())} != {*found.callers.get(weight, ())} for weight in cut):",
        "if False:",
        "tests/techniques/tp/test_places.py -k of_row-cut-True",
        "a layer that a hook of a later block calls is computed of a part, and never summed",
    ),
    Mutant(
        "plain-run-of-another-mode",
        "        self._has_run = False\n        self._plain.clear()\n",
        "        self._has_run = False\n",
        "tests/model/test_plain_runs.py -k once_for_a_mode",
        "what the search knows of eval mode is taken for training",
    ),
    Mutant(
        "plain-run-with-old-buffers",
        "if run.nbytes > _MOST_KEPT or self.written:",
        "if run.nbytes > _MOST_KEPT:",
        "tests/model/test_plain_runs.py -k writes_a_buffer",
        "gradients are asked for of buffers that a run no longer uses",
    ),
    Mutant(
        "begin-of-a-run-changed-later",
        "            if x._version != self.versions[call]:\n",
        "            if False:\n",
        "tests/model/test_plain_runs.py -k changes_in_place",
        "what a layer got is taken as what later code has made of it",
    ),
    Mutant(
        "rows-compared-before-they-changed",
        "version_of(mine), version_of(full)",
        "0, 0",
        "tests/model/test_plain_runs.py -k compared_once",
        "a tensor that code has changed since it was compared is not compared again",
    ),
    Mutant(
        "search-finds-what-it-kept",
        "                stack.callback(self._call.restore)\n",
        "",
        "tests/techniques/tp/test_places.py -k module_global-cut-False",
        "a run of the search computes with what another one has kept outside of the model",
    ),
    Mutant(
        "search-finds-attributes-it-kept",
        "                    attributes.restore()\n",
        "",
        "tests/techniques/tp/test_places.py -k attribute-cut-False",
        "a run of the search computes with what another one has kept in the model",
    ),
    Mutant(
        "names-put-together-elsewhere",
        'if names & _STORE_BY_TEXT and not is_opaque(space.get("__name__")):',
        "if False:",
        "tests/techniques/tp/test_places.py -k put_together_elsewhere-cut-True",
        "what a forward keeps in another module, by a name that it puts together, is one of the search's",
    ),
    Mutant(
        "text-files-not-put-back",
        "            part.truncate()\n",
        "",
        "tests/techniques/tp/test_places.py -k in_text",
        "what a forward keeps as text in memory is one of the search's",
    ),
    Mutant(
        "search-sees-one-forward",
        "if whole.keeps and not (why or alone):",
        "if False:",
        "tests/techniques/tp/test_places.py -k second_count-outside-False",
        "what one forward keeps for the next is not seen",
    ),
    Mutant(
        "backward-from-inside-unnoticed",
        "        before_backward(_refuse_from_inside)\n",
        "",
        "tests/techniques/data/test_second_order.py -k inside_of_a_unit",
        "a backward that begins at a feature caught in a unit reads freed memory",
    ),
    Mutant(
        "search-second-forward-on-old-outputs",
        "                with first as self._running:\n",
        "                with first:\n",
        "tests/techniques/tp/test_places.py -k norms_over_all_heads",
        "the first of two forwards gets the norms of another run",
    ),
    Mutant(
        "search-empties-caches",
        "            if (table := _table(part)) is None:",
        "            if True:",
        "tests/techniques/tp/test_places.py -k norms_over_all_heads",
        "what a user has put into a cache is lost",
    ),
    Mutant(
        "replicas-with-a-wide-limit",
        "    return weights[axis.rank] / max(map(abs, weights))",
        "    return weights[axis.rank] / 8",
        "tests/parallel/test_replicas.py -k missing",
        "a missing part of a gradient passes for rounding in bfloat16",
    ),
    Mutant(
        "replicas-over-tp-not-made-equal",
        '                local.copy_(axis.reduce(local, "sum") / axis.size)',
        "                pass",
        "tests/parallel/test_replicas.py",
        "parameters of ranks drift apart by rounding",
    ),
    Mutant(
        "replicas-over-tp-not-compared",
        "            if off > max(size, least) * self._rounding(name):",
        "            if False:",
        "tests/parallel/test_replicas.py",
        "a part of a gradient is taken for the whole",
    ),
    Mutant(
        "tp-plan-with-half-a-pair",
        'if kind != "whole" and not _agrees(kind, cut.get(weight)):',
        "if False:",
        "tests/techniques/tp/test_given_plan.py -k said",
        "a layer that a plan names is left whole without a word",
    ),
    Mutant(
        "tp-other-tensors-than-the-example",
        "if torch.is_grad_enabled() and (more := ",
        "if False and (more := ",
        "tests/techniques/tp/test_misuse.py -k mask",
        "a forward takes another way than the one that was tried",
    ),
    Mutant(
        "tp-written-statistics",
        "if name := _written_in(region, written):",
        "if False:",
        "tests/techniques/tp/test_other_uses.py -k RunningMean",
        "a running mean over features is that of a rank's part",
    ),
    Mutant(
        "tp-torchs-kernel-on-parts",
        "    module.register_forward_pre_hook(lambda *_: None)\n\n\ndef _attend",
        "\n\ndef _attend",
        "tests/techniques/tp/test_torch_attention.py -k own_kernel",
        "without gradients torch's own kernel is given a rank's part of the weights",
    ),
    Mutant(
        "fused-largest-of-one-rank",
        "        largest = max_over(largest, share.group)\n",
        "        pass\n",
        "tests/step/test_linear_loss.py -k over_ranks",
        "each rank sums exponents beside another number",
    ),
    Mutant(
        "fused-inputs-not-summed",
        "    if of_rows is not None and share is not None:\n",
        "    if False:\n",
        "tests/step/test_linear_loss.py -k over_ranks",
        "the model is trained by the logits of a rank's tokens",
    ),
    Mutant(
        "fused-float16-in-the-forward",
        "ctx.is_late, ctx.share, ctx.options = rows.dtype == torch.float16, share, options",
        "ctx.is_late, ctx.share, ctx.options = False, share, options",
        "tests/step/test_linear_loss.py -k loss_scale",
        "small gradients are 0 before the loss scale could keep them",
    ),
    Mutant(
        "fused-unknown-label",
        "losses = torch.where(num_found == 1, losses, torch.nan)  # a label that is no class",
        "pass",
        "tests/step/test_linear_loss.py -k no_class",
        "on a GPU, a label beyond the vocabulary counts as one without a target",
    ),
    Mutant(
        "fused-code-after-the-head",
        'if what not in _LOOKS or func in _DATA or (what == "register_hook" and not _is_of_units(args[1])):',
        "if False:",
        "tests/step/test_fused.py -k refused",
        "capped logits are left uncapped, or the loss is capped in their place",
    ),
    Mutant(
        "model-loss-of-nothing",
        "return torch.where(count > 0, mean * count, torch.zeros_like(mean))",
        "return mean * count",
        "tests/step/test_model_loss.py -k tuple",
        "a micro-batch without a label makes the loss NaN",
    ),
    Mutant(
        "model-loss-shifted-twice",
        'given["shift_labels"] = batch["labels"]',
        "pass",
        "tests/step/test_model_loss.py -k transformers",
        "a model of transformers is trained on the token after next",
    ),
    Mutant(
        "model-loss-weighed-once",
        "is_new = self._is_mean and bool(num_ignored) and not self._has_ignored",
        "is_new = False",
        "tests/step/test_model_loss.py -k another_mean",
        "a mean of means is not seen where the first window has all its labels",
    ),
    Mutant(
        "model-loss-shift-unseen",
        "is_seen and by_first <= UNCHANGED * by_second",
        "False",
        "tests/step/test_loss_check.py -k shift",
        "a model that shifts labels itself is trained on the token after next",
    ),
    Mutant(
        "model-loss-tried-once",
        "is_due = is_new or num_steps & (num_steps - 1) == 0  # windows 0, 1, 2, 4, 8, ...",
        "is_due = is_new",
        "tests/step/test_model_loss.py -k something_else",
        "a mean over a mask is not seen where the first window has no padding",
    ),
    Mutant(
        "model-loss-of-strided-parts",
        "x[start::2].contiguous() if",
        "x[start::2] if",
        "tests/step/test_model_loss.py -k something_else",
        "models that call view() on labels are not tried: a sum trains",
    ),
    Mutant(
        "model-loss-in-half",
        'if getattr(func, "__name__", "") in _LOSSES:',
        "if False:",
        "tests/step/test_model_loss.py -k 'something_else or right_mean'",
        "in half precision a wrong mean passes, and right ones are refused",
    ),
    Mutant(
        "model-loss-in-eval-mode-only",
        "module.training = not acts_by_mode(module)",
        "module.training = False",
        "tests/step/test_model_loss.py -k something_else",
        "a loss that is another one in training is not seen",
    ),
    Mutant(
        "model-loss-shift-unseen-in-logits",
        'is_shifted = not is_aligned and bool(fits) and "aligned" not in fits',
        "is_shifted = False",
        "tests/step/test_model_loss.py -k 'twice or something_else'",
        "a model that rolls its labels is trained on the token after next",
    ),
    Mutant(
        "model-loss-of-all-guesses",
        "for name, given in by_name.items() if given != counts}",
        "for name, given in by_name.items()}",
        "tests/step/test_loss_check.py -k few_times",
        "what the first window has shown is tried again for ever, in windows that come ever more rarely",
    ),
    Mutant(
        "draws-of-a-forward-unseen",
        "return run(), _next_numbers(world.device, generators) != untouched",
        "return run(), False",
        "tests/step/test_sums.py tests/step/test_loss_check.py -k 'draws or not_exact or random'",
        "a sum of a model with dropout of its own is refused, as what it draws looks like a part that does not grow",
    ),
    Mutant(
        "model-run-beside-its-schedule",
        "if runtime.cannot_run_alone is not None:",
        "if runtime.cannot_run_alone == ():",
        "tests/step/test_loss_check.py -k cannot_be_run_alone",
        "a stage of a pipeline waits for others that do not run",
    ),
    Mutant(
        "loss-tried-by-each-rank-for-itself",
        "if not self.is_due or self._is_mean:",
        "if not self.is_due or self._is_mean or once.keys() <= self._found:",
        "tests/step/test_collective_loss.py",
        "a loss with a collective in it runs more often on some ranks: they wait for the others",
    ),
    Mutant(
        "hooks-of-parts-stay-off",
        "        if not self._are_off:\n            self._of_small.resume()\n",
        "",
        "tests/techniques/data/test_unused.py -k by_itself",
        "under replicas a part that is called by itself after a forward is taken for a penalty",
    ),
    Mutant(
        "none-sent-as-what-memory-held",
        "            views[i].zero_()",
        "            views[i].fill_(7)",
        "tests/techniques/data/test_unused.py -k one_rank",
        "a rank without a gradient adds what lay in memory before to those of the others",
    ),
    Mutant(
        "buffers-compared-by-their-first-byte",
        "crc32c((ctypes.c_char * size)",
        "crc32c((ctypes.c_char * 1)",
        "tests/model/test_checksums.py",
        "buffers that a forward writes through .data stay different on the ranks",
    ),
    Mutant(
        "count-of-the-model-unseen",
        "return counter_of(model, loss, count) if isinstance(model, TaskModel) else count_of(loss, count)",
        "return count_of(loss, count)",
        "tests/step/test_window.py -k count_of_its_own",
        "in a loop over a model with a count of its own, gradients are divided by the number of labels",
    ),
    Mutant(
        "model-loss-of-other-counts",
        "return ModelLoss(count_of(loss, count)) if loss is model_loss else loss",
        "return ModelLoss() if loss is model_loss else loss",
        "tests/step/test_model_loss.py -k users",
        "the model's mean is multiplied by the labels, and divided by what count= counts",
    ),
    Mutant(
        "grown-rows-of-zeros",
        "self._means[columns] = total / num_rows",
        "self._means[columns] = torch.zeros_like(total)",
        "tests/state/test_changed_rows.py",
        "rows that are added to a vocabulary begin as zeros",
    ),
    Mutant(
        "saved-rows-with-nulls",
        "for key, inner in value.items() if inner is not None}",
        "for key, inner in value.items()}",
        "tests/data/sft/test_saved.py -k jsonl",
        "a chat template sees fields that the record does not have",
    ),
    Mutant(
        "cached-tokens-unchecked",
        'and _sum(file, index["places"][""]["at"], tokens.nbytes, check) != index["places"][""]["crc"]',
        "and False",
        "tests/data/test_token_cache.py -k damaged_or_foreign",
        "tokens of a damaged file are trained on",
    ),
    Mutant(
        "stopped-only-within-steps",
        "if not isinstance(error, SystemExit) or error.code not in reasons or newest is None:",
        "if True:",
        "tests/cli/test_resume_command.py -k outside_its_steps",
        "a job that is asked to stop while it loads or writes weights is not started again",
    ),
    Mutant(
        "padding-taken-for-data",
        "or is_padding(batch) for batch in batches):",
        "for batch in batches):",
        "tests/step/test_same_data.py -k warned",
        "the warning of equal samples, where a rank has a copy that counts as nothing",
    ),
    Mutant(
        "script-not-run-on-ranks",
        "        load_script(job.script)\n",
        "",
        "tests/launch/test_script.py",
        "functions of the script that starts the ranks are not found there",
    ),
    Mutant(
        "gathered-views-unmarked",
        "            if cuts != cuts_of(each) and not is_fake(tensor._local_tensor):",
        "            if False:",
        "tests/parallel/test_lost_writes.py -k no_write_is_lost",
        "under dp_shard, what is written into a row of a parameter is lost",
    ),
    Mutant(
        "views-of-gathered-views-unmarked",
        "if type(each) is DTensor and _address(each) == _address(given[0]):",
        "if False:",
        "tests/parallel/test_lost_writes.py -k no_write_is_lost",
        "under dp_shard, what is written into a view of a row of a parameter is lost",
    ),
    Mutant(
        "row-set-to-a-number",
        '    if isinstance(tensor, _Gathered):\n        _refuse(tensor, "fill_", origin=tensor.origin)\n',
        "",
        "tests/parallel/test_lost_writes.py -k no_write_is_lost",
        "under dp_shard, w[0] = 0 is lost",
    ),
    Mutant(
        "host-numbers-through-the-device",
        'return new_group(None, timeout_s, "gloo"), torch.device("cpu")',
        "return group, device",
        "tests/step/test_reads.py -k nccl_alone",
        "beside a group of NCCL alone, a step reads the device three times",
    ),
    Mutant(
        "steps-with-unwritten-memory",
        "return _numbers() >= (2, 13)",
        "return True",
        "tests/world/test_imagined.py -k nothing_has_written",
        "before torch 2.13 a step of imagined ranks trains with whatever memory held",
    ),
    Mutant(
        "prompt-continued-by-parts",
        "is_split = self.for_forward is not _whole\n        return",
        "is_split = False\n        return",
        "tests/techniques/test_toys.py -k until_a_technique",
        "where a technique splits batches, a sample of the model is made of parts",
    ),
    Mutant(
        "gathered-for-a-write",
        "isinstance(then, DTensorSpec) and cuts_of(given) != cuts_of(then):",
        "False:",
        "tests/parallel/test_lost_writes.py -k no_write_is_lost",
        "under dp_shard, index_copy_ and index_add_ of a parameter are lost, and its placements are wrong from then on",
    ),
    Mutant(
        "data-of-shards-assigned",
        '    _refuse(tensor, "data", origin=origin_of(tensor))\n',
        "",
        "tests/parallel/test_lost_writes.py -k no_write_is_lost",
        "under dp_shard, p.data = value changes nothing",
    ),
    # ---- adapters, weights in 4 bits ------------------------------------------------------------------------------
    Mutant(
        "adapter-role-of-a",
        'LAYER_FUNCTIONS[adapted_linear] = ((None, "in"), ("out", None),',
        'LAYER_FUNCTIONS[adapted_linear] = ((None, None), ("out", None),',
        "tests/techniques/lora/test_adapters.py -k function_is_right",
        "A is not cut with the inputs of its layer",
    ),
    Mutant(
        "left-base-not-compared",
        "            refuse_other_base(self.runtime, self.base, self.digests, self.saved.folder)\n",
        "            pass\n",
        "tests/state/test_left_base.py -k another_base",
        "a run resumes beside another base than it was trained with",
    ),
    Mutant(
        "left-base-without-places",
        "    return (mixed ^ (mixed >> 27)) | 1\n",
        "    return mixed * 0 + 1\n",
        "tests/state/test_left_base.py -k another_base",
        "two numbers of the base that changed places are not noticed",
    ),
    Mutant(
        "left-base-copies-counted",
        "        if ranks[number % len(ranks)] == rank:\n            for block",
        "        if True:\n            for block",
        "tests/state/test_left_base.py -k digests",
        "digests of the base depend on how many ranks hold it, so that a run does not resume under another layout",
    ),
    Mutant(
        "left-base-half-a-model",
        "    if source.left_base is not None:\n        raise",
        "    if False:\n        raise",
        "tests/state/test_left_base.py -k what_is_missing",
        "convert writes a model without its frozen weights",
    ),
    Mutant(
        "left-base-origin",
        "            if self.base is None or prefix:  # else",
        "            if True:  # else",
        "tests/state/test_left_base.py -k resumes_under",
        "a second resume looks for the base in the checkpoint that is without it",
    ),
    Mutant(
        "adopted-norm-of-a-part",
        'for name in {edit.module, *edit.args["callers"]}:',
        "for name in {edit.module}:",
        'tests/techniques/lora/test_adopted.py -k "files and dora and tp"',
        "an adopted DoRA layer that is cut by its inputs divides by the norms of a part",
    ),
    Mutant(
        "adopted-without-proof",
        "            return _differs(layer)\n",
        '            return ""\n',
        'tests/techniques/lora/test_adopted.py -k "other_code"',
        "a layer of PEFT whose class computes something else is computed as LoRA",
    ),
    Mutant(
        "adopted-lora-bias",
        "if not is_table and layer.lora_B[name].bias is not None:",
        "if False:",
        'tests/techniques/lora/test_adopted.py -k "not_adopted"',
        "the bias of a factor of PEFT is left out",
    ),
    Mutant(
        "adopted-scale-changed",
        "or layer.scaling[name] != layer.adapter.scale",
        "",
        'tests/techniques/lora/test_adopted.py -k "changes_after"',
        "set_scale of PEFT after parallelize changes nothing",
    ),
    Mutant(
        "adopted-merged",
        "    if layer.merged_adapters:\n        what",
        "    if False:\n        what",
        'tests/techniques/lora/test_adopted.py -k "changes_after"',
        "an adapter that PEFT has merged is added once more",
    ),
    Mutant(
        "adopted-written-as-it-is-not",
        '        _refuse_others(runtime.recipe, "merged into the weights")\n',
        "",
        'tests/techniques/lora/test_adopted.py -k "not_adopted"',
        "weights of a model with other adapters of PEFT are written without them",
    ),
    Mutant(
        "adopted-original-not-loaded",
        "        if home in found.tensors and copy not in found.tensors:",
        "        if False:",
        'tests/techniques/lora/test_adopted.py -k "files and dora"',
        "of a module that PEFT trains in full, the original is not loaded",
    ),
    Mutant(
        "adopted-bytes-reordered",
        'if getattr(state, "packing_format_for_cpu", False):',
        "if False:",
        'tests/techniques/lora/test_adopted.py -k "bitsandbytes"',
        "weights that bitsandbytes has reordered for the CPU are taken as they lie",
    ),
    Mutant(
        "adapter-role-of-m",
        '("out", None), ("out",), (None, None), BUFFER, BUFFER)',
        '("out", None), (None,), (None, None), BUFFER, BUFFER)',
        "tests/techniques/lora/test_adapters.py -k function_is_right",
        "DoRA's magnitudes are not cut with the outputs",
    ),
    Mutant(
        "adapter-partial-left-out",
        "        if dim is None or any(part.replicas > 1 for part in rows):\n            partial.append(",
        "        if False:\n            partial.append(",
        "tests/techniques/lora/test_parity.py -k test_models",
        "the factor that every rank has whole is not summed over tp",
    ),
    Mutant(
        "adapter-scale-of-rslora",
        "math.sqrt(self.rank) if self.rslora else self.rank",
        "self.rank",
        "tests/techniques/lora/test_adapters.py -k numbers_are_those_of_peft",
        "rsLoRA is scaled as LoRA",
    ),
    Mutant(
        "adapter-norm-of-a-part",
        "        return how.sum_over_inputs(rows.square().sum(1)).sqrt()",
        "        return rows.square().sum(1).sqrt()",
        "tests/techniques/lora/test_adapters.py -k function_is_right",
        "DoRA's norm of a part of the inputs is taken for that of all",
    ),
    Mutant(
        "adapter-norm-with-gradient",
        "    with torch.no_grad():\n        rows = weight if how.out_dim == 0",
        "    with torch.enable_grad():\n        rows = weight if how.out_dim == 0",
        "tests/techniques/lora/test_adapters.py -k numbers_are_those_of_peft",
        "a gradient goes through DoRA's norm",
    ),
    Mutant(
        "adapter-of-experts-turned",
        "high.reshape(high.shape[0], -1, self.num_experts).permute(2, 0, 1)",
        "high.reshape(high.shape[0], self.num_experts, -1).permute(1, 0, 2)",
        "tests/techniques/lora/test_experts.py -k numbers_are_those_of_peft",
        "columns of B are those of one expert after the other, and in PEFT's files each expert's lie apart",
    ),
    Mutant(
        "adapter-of-experts-merged-from-the-first",
        "enumerate(range(how.num_experts)[index[0]])",
        "enumerate(range(how.num_experts)[: part.shape[0]])",
        "tests/techniques/lora/test_experts.py -k merge_in_pieces",
        "a shard of experts is merged with the adapters of the first ones",
    ),
    Mutant(
        "adapter-alpha-of-a-layer",
        "(2 * self.rank_of(name) if self.alpha is None else self.alpha))",
        "(2 * self.rank if self.alpha is None else self.alpha))",
        "tests/state/test_adapters.py -k closest",
        "a layer of another rank, without an alpha, has another scale than the others",
    ),
    Mutant(
        "adapter-rank-by-the-last-of-patterns",
        "    best = max(closeness(name, pattern) for pattern in patterns)",
        "    return patterns[0]",
        "tests/state/test_adapters.py -k closest",
        "of two patterns that mean a layer the first counts, so that ranks in a file of whole names depend on their order",
    ),
    Mutant(
        "adapter-numbers-past-the-names",
        "        lora = lora.settled({name: draft",
        "        ({name: draft",
        "tests/state/test_adapters.py -k targets_are",
        "files and scales are of the option as it was given, and layers have the numbers of their classes",
    ),
    Mutant(
        "adapter-file-top-name-unanchored",
        'f"^{re.escape(name)}" if are_whole else',
        'f"^{re.escape(name)}" if are_whole and "." in name else',
        "tests/state/test_adapters.py -k ends_others",
        "PEFT takes the number of a layer for those of others whose names end as its own",
    ),
    Mutant(
        "adapter-numbers-of-a-name-that-is-whole",
        " or (len(each) > 1 and last in values and each[0] != otherwise)",
        "",
        "tests/state/test_adapters.py -k ends_others",
        "numbers by the last part of names are read as those of the one layer that is called so",
    ),
    Mutant(
        "adapter-numbers-of-parameters-that-are-not",
        "named if len(named) == len(parts_of) else",
        "named if False else",
        "tests/state/test_adapters.py -k modules_have",
        "LoRA.of of PEFT's all-linear names parameters that no module has",
    ),
    Mutant(
        "adapter-copy-of-a-head-merged-from-the-base",
        "base.dtype, copy, low, high",
        "base.dtype, base, low, high",
        "tests/state/test_adapters.py -k heads_base",
        "convert --adapter merges into another base than the one in the adapter's file",
    ),
    Mutant(
        "adapter-off-where-the-base-is-gone",
        "    if name := _trained_base(model):",
        "    if False:",
        "tests/techniques/lora/test_adapters.py -k more_than_adapters",
        "adapter_off gives answers of modules that were trained in full",
    ),
    Mutant(
        "run-folders-alike",
        "            if other != key:\n                raise ConfigError(",
        "            if False:\n                raise ConfigError(",
        "tests/cli/test_train_examples.py -k about_adapters",
        "adapters are written into the folder of the merged weights",
    ),
    Mutant(
        "adapter-scale-of-a-parameter",
        "weight.shape, self.scales[name])",
        "weight.shape, next(iter(self.scales.values())))",
        "tests/state/test_adapters_of_experts.py -k mixtral-ranks",
        "parameters of a module are computed with the scale of its first one",
    ),
    Mutant(
        "adapter-scales-by-their-mean",
        "own or round(entry.scale, 12)",
        "round(entry.scale, 12)",
        "tests/techniques/lora/test_adapters.py -k another_scale",
        "a checkpoint is loaded into adapters whose layers have other scales of the same mean",
    ),
    Mutant(
        "adapter-alpha-pattern-not-read",
        'said("lora_alpha", "alpha_pattern", name.removesuffix',
        'said("lora_alpha", "", name.removesuffix',
        "tests/state/test_adapters.py -k patterns",
        "alpha_pattern of PEFT's files is passed over",
    ),
    Mutant(
        "adapter-of-parameters-by-peft-sharded",
        'if name is None or draft.layout.degree("fsdp") == 1:',
        "if True:",
        "tests/techniques/lora/test_adopted.py -k would_be_cut",
        "PEFT's adapters of parameters are refused by the first step alone, after all weights were loaded",
    ),
    Mutant(
        "adapter-of-experts-inner-key",
        "INNER * (len(names) - 1 - place)",
        "INNER * place",
        "tests/state/test_adapters_of_experts.py -k peft_and_transformers_read",
        "adapters of two parameters have each other's keys in PEFT's file",
    ),
    Mutant(
        "adapter-of-experts-read-outside",
        "if function != adapted_weight.__name__]",
        "if not function]",
        "tests/techniques/lora/test_experts.py -k other_code_reads",
        "code that reads a parameter outside of its module's forward passes over its adapter",
    ),
    Mutant(
        "adapter-of-experts-left-on-the-module",
        "            for owner, attr, _ in made:\n                object.__delattr__(owner, attr)",
        "            pass",
        "tests/techniques/lora/test_experts.py -k first_answer",
        "after a forward the adapted weight stays in place of the parameter",
    ),
    Mutant(
        "adapter-of-attention-by-peft",
        'if "auto_mapping" in config and not',
        "if False and not",
        "tests/techniques/lora/test_experts.py -k attention_of_torch_in_pefts_files",
        "adapters that PEFT has trained with that of out_proj counted twice are loaded as if it were once",
    ),
    Mutant(
        "adapter-of-a-head-not-summed",
        '                facts["partial"].append(each.name)\n        of_table',
        "                pass\n        of_table",
        "tests/techniques/lora/test_parity.py -k head_with_an_adapter",
        "the gradient of A of a head that is cut by tokens is that of a rank's tokens",
    ),
    Mutant(
        "adapter-of-a-parameter-in-backward",
        "isinstance(found, nn.Parameter) and not self.adapter_is_off and in_backward()",
        "False",
        "tests/techniques/lora/test_experts.py -k runs_again_in_a_backward",
        "a part of a forward that is computed again in a backward is so without the adapter",
    ),
    Mutant(
        "adapter-of-other-parameters",
        '    peft_parameters.refuse_others(folder, there["experts"], stacks, names)\n',
        "",
        "tests/state/test_adapters_of_experts.py -k other_parameters",
        "adapters of one parameter are loaded into those of another of the same shapes",
    ),
    Mutant(
        "adapter-bias-twice",
        "y = compute(x, None if self._is_row else bias)",
        "y = compute(x, bias)",
        "tests/techniques/lora/test_parity.py -k added_once",
        "the bias of a row-parallel layer with an adapter is added once for each rank and once more",
    ),
    Mutant(
        "adapter-fast-path",
        "        module.activation_relu_or_gelu = 0\n",
        "        pass\n",
        "tests/techniques/lora/test_adapters.py -k fast_path",
        "torch's fast path of an encoder passes over adapters in eval mode",
    ),
    Mutant(
        "adapter-in-head",
        "        if layer is head or id(layer.weight) in weights or (num_outputs in rows and not in_block):",
        "        if False:",
        "tests/techniques/lora/test_adapters.py -k leaves_heads",
        "all-linear takes the head too",
    ),
    Mutant(
        "adapter-in-multihead-attention",
        '    if isinstance(outer, nn.MultiheadAttention):\n        return "nn.MultiheadAttention, which can have one itself, reads its weight and does not call it"\n',
        "",
        "tests/techniques/lora/test_adapters.py -k not_be_part_of",
        "an adapter beside a weight that nn.MultiheadAttention reads",
    ),
    Mutant(
        "adapter-readers-unseen",
        "        if weight in foreign:\n            found[name]",
        "        if False:\n            found[name]",
        "tests/techniques/lora/test_adapters.py -k other_code_reads",
        "code that reads a weight past its layer passes over the adapter",
    ),
    Mutant(
        "adapter-same-dropout",
        "            if self._drops_input and shared.stream is not None:\n                shared.stream.enter()",
        "            if False:\n                shared.stream.enter()",
        "tests/techniques/lora/test_adapters.py -k masks",
        "ranks drop the same inputs of their parts",
    ),
    Mutant(
        "adapter-base-stored-wide",
        "else precision.compute if is_base else None) or fact.dtype",
        "else None) or fact.dtype",
        "tests/techniques/lora/test_adapters.py -k stored_as_it_is_computed",
        "a frozen base is stored in float32 under bf16",
    ),
    Mutant(
        "adapter-on-in-second-run",
        "            stack.enter_context(adapters_as(self.state.switches, self.adapters))\n",
        "",
        "tests/techniques/lora/test_adapters.py -k runs_again",
        "a block whose adapters were off runs again, in backward, with them",
    ),
    Mutant(
        "adapter-merged-tie",
        "        if name in tied:\n            continue\n",
        "",
        "tests/state/test_merged.py -k bits_of_save",
        "convert --adapter of a tied table that was trained is refused",
    ),
    Mutant(
        "adapter-merged-attention",
        '        return f"{layer}.in_proj_weight"\n',
        '        return f"{layer}.weight"\n',
        "tests/state/test_merged.py -k attention",
        "convert --adapter of nn.MultiheadAttention looks for a weight that it has not",
    ),
    Mutant(
        "adapter-file-targets-others",
        '    return found if is_meant else "|".join(map(re.escape, found))\n',
        "    return found\n",
        "tests/state/test_adapters.py -k ends_as",
        "PEFT puts adapters beside layers whose names end as that of one with an adapter",
    ),
    Mutant(
        "adapter-file-ends-as-dropout",
        "_short(owners, [*inside, *of_peft], whole_parts=False)",
        "_short(owners, inside, whole_parts=False)",
        "tests/state/test_adapters.py -k ends_as",
        "PEFT takes a module called out for its lora_dropout, and cannot read the adapters",
    ),
    Mutant(
        "adapter-weights-of-another-scale",
        "        refuse_other_meaning(runtime.recipe, meaning_in(source, files), Path(source.place))\n",
        "        pass\n",
        "tests/techniques/lora/test_adapters.py -k another_scale",
        "the weights of a checkpoint are loaded into adapters of another scale",
    ),
    Mutant(
        "adapter-not-off",
        "            return self.alone(*args, **kwargs)\n        return self.compute(only(args, kwargs), self.bias)",
        "            pass\n        return self.compute(only(args, kwargs), self.bias)",
        "tests/techniques/lora/test_adapters.py -k base_answers",
        "adapter_off leaves adapters on",
    ),
    Mutant(
        "adapter-b-begins-at-zero-in-proofs",
        "            (low if isinstance(layer, AdaptedEmbedding) else high).normal_(std=0.1)",
        "            pass",
        "tests/techniques/lora/test_adapters.py -k fast_path",
        "a proof with B = 0 sees no gradient of A",
    ),
    Mutant(
        "tp-uncalled-unnoticed",
        "            if uncalled and len(uncalled) < len(group):",
        "            if False:",
        "tests/techniques/lora/test_adapters.py -k no_trial_looked",
        "a cut layer whose weight is used otherwise where no trial looked",
    ),
    Mutant(
        "tp-other-use-unnoticed",
        "            if isinstance(value, Tensor) and (name := self.weight_of(value)) in self._layers:",
        "            if False:",
        "tests/techniques/lora/test_adapters.py -k no_trial_looked",
        "a function of a part of a weight is taken for that of the whole",
    ),
    Mutant(
        "tp-turned-embedding",
        "functional.embedding(x, weight if self._out_dim else weight.t())",
        "functional.embedding(x, weight)",
        "tests/techniques/lora/test_parity.py -k embeddings_heads",
        "an embedding by a turned weight that is cut",
    ),
    Mutant(
        "nf4-group-from-here",
        ".reshape(-1)[begin % GROUP :]",
        ".reshape(-1)",
        "tests/techniques/quantize/test_packed.py -k definition",
        "groups of scales are counted from the first block that is here",
    ),
    Mutant(
        "nf4-scales-from-the-rows-first-block",
        "found.reshape(-1)[flat % BLOCK :]",
        "found.reshape(-1)",
        "tests/techniques/quantize/test_packed.py -k definition",
        "of rows that begin within a block the scales are counted from its start",
    ),
    Mutant(
        "nf4-scales-from-the-inputs-first-block",
        ".reshape(num, -1)[:, first % BLOCK :]",
        ".reshape(num, -1)",
        "tests/techniques/quantize/test_codec.py -k every_width",
        "of inputs that begin within a block the scales are counted from its start",
    ),
    Mutant(
        "nf4-mean-in-float32",
        "    mean = maxima.double().mean().float()",
        "    mean = maxima.mean() * (1 + 1e-6)",
        "tests/techniques/quantize/test_packed.py -k definition",
        "the mean of the scales is another",
    ),
    Mutant(
        "nf4-nibbles-turned",
        "torch.bitwise_or(index[:, ::2] << 4, index[:, 1::2])",
        "torch.bitwise_or(index[:, 1::2] << 4, index[:, ::2])",
        "tests/techniques/quantize/test_packed.py -k definition",
        "the halves of a byte are exchanged",
    ),
    Mutant(
        "nf4-first-input-forgotten",
        "        inputs = torch.arange(self.first, self.first + self.num_inputs",
        "        inputs = torch.arange(0, self.num_inputs",
        "tests/techniques/quantize/test_packed.py -k definition",
        "blocks of a part of the inputs are counted from the first that is here",
    ),
    Mutant(
        "nf4-rows-forgotten",
        "            rows = tuple((piece.starts[0], piece.sizes[0]) for piece in pieces)",
        "            rows = tuple((0, piece.sizes[0]) for piece in pieces)",
        "tests/techniques/quantize/test_packed.py -k test_models",
        "a rank that has some rows unpacks them with the scales of the first ones",
    ),
    Mutant(
        "nf4-keeps-the-weight",
        "        ctx.save_for_backward(codes, scales, outer, mean)\n        ctx.packing = packing\n        return functional.linear(x, unpack(codes, scales, outer, mean, packing, x.dtype))",
        "        ctx.save_for_backward(codes, scales, outer, unpack(codes, scales, outer, mean, packing, x.dtype))\n        ctx.packing = packing\n        return functional.linear(x, ctx.saved_tensors[3])",
        "tests/techniques/quantize/test_packed.py -k keeps_bytes",
        "the backward keeps the plain weight",
    ),
    Mutant(
        "nf4-default-dtype",
        'table = torch.tensor(TABLE, dtype=torch.float32, device="cpu")\n    byte',
        'table = torch.tensor(TABLE, device="cpu")\n    byte',
        "tests/techniques/quantize/test_packed.py -k default_dtype",
        "tables are made in the default dtype of the first call",
    ),
    Mutant(
        "nf4-half-a-byte",
        "            if name in rows and function and function[1].packing and self._widths[name] // self._degree % 2:",
        "            if False:",
        "tests/techniques/quantize/test_packed.py -k a_byte_has_two",
        "inputs are cut between the two codes of a byte",
    ),
    Mutant(
        "nf4-magnitude-of-the-plain-weight",
        "                    magnitude.copy_(row_norms(layer.weight, None, None, Adapter()))",
        "                    magnitude.mul_(1)",
        "tests/techniques/quantize/test_packed.py -k magnitudes",
        "DoRA's magnitudes are the norms of the weight before it is packed",
    ),
    Mutant(
        "mean-losses-of-parts-as-torch",
        "    handlers |= dict.fromkeys(_LOSSES, _averaged) | dict",
        "    handlers |= dict",
        "tests/step/test_penalty_losses.py",
        "a mean-squared distance of a cut parameter is divided by the elements of each rank, and its gradient counts once for each",
    ),
    Mutant(
        "shared-memory-unnoticed",
        "if other.memory != one.memory or other.start >= one.end:",
        "if other.memory != one.memory or other.start >= one.start:",
        "tests/parallel/test_shared_memory.py -k overlaps",
        "two weights tied by .data = get memory of their own when they are sharded, and train apart",
    ),
    Mutant(
        "shared-memory-without-elements",
        "    if not has_gaps or other.tensor.element_size() != size or apart % size:",
        "    if size:",
        "tests/parallel/test_shared_memory.py -k overlaps",
        "parameters that are the even and the odd columns of one matrix are refused, though they share nothing",
    ),
    Mutant(
        "replaced-parameters-computed-with",
        "            tensor.__class__ = _Replaced\n",
        "            pass\n",
        "tests/parallel/test_replaced_parameters.py -k holds",
        "a functools.partial or a global that holds a parameter computes with it as it was before sharding, without a gradient",
    ),
    Mutant(
        "views-of-replaced-parameters",
        "            tensor.register_hook(functools.partial(_refuse_gradient, name))\n",
        "",
        "tests/parallel/test_replaced_parameters.py -k holds",
        "a view of a parameter, made before sharding and kept elsewhere, takes its gradient and is never updated",
    ),
    Mutant(
        "attributes-of-shards-lost",
        '            vars(param).update(vars(parameters[name]))  # what the user has set on it, such as "no weight decay"\n',
        "            pass\n",
        "tests/parallel/test_parameter_attributes.py -k stay",
        "parameters marked _no_weight_decay, as those of Mamba are, decay under dp_shard",
    ),
    Mutant(
        "attributes-of-gathered-parameters-lost",
        "            vars(param._unsharded_param).update(users)\n",
        "            pass\n",
        "tests/parallel/test_parameter_attributes.py -k stay",
        "a forward that asks a parameter for a mark that was set on it does not find it",
    ),
    Mutant(
        "classes-of-parameters-dropped",
        "    if issubclass(type(param), nn.Parameter) and type(param) is not nn.Parameter:",
        "    if type(param) is Tensor:",
        "tests/parallel/test_parameter_attributes.py -k class",
        "a parameter of a class of its own becomes a plain one, and what asks for the class passes it by",
    ),
    Mutant(
        "reductions-over-no-dims-as-torch",
        '    if named.get("dim") == []:\n',
        '    if named.get("dim") == [0, 0]:\n',
        "tests/step/test_penalty_losses.py",
        "the gradient of amax() of a cut parameter is NaN if its largest element is not on the first rank",
    ),
    Mutant(
        "hooks-on-nodes-unnoticed",
        "    return sys.getrefcount(node) > 2 and any(",
        "    return sys.getrefcount(node) > 99 and any(",
        "tests/techniques/data/test_hooks.py -k node",
        "a hook on the node that accumulates a gradient is never called",
    ),
    Mutant(
        "nodes-of-a-graph-taken-for-hooks",
        "    return sys.getrefcount(node) > 2 and any(not isinstance(each, FrameType) for each in gc.get_referrers(node))",
        "    return sys.getrefcount(node) > 2",
        "tests/techniques/data/test_hooks.py -k node",
        "a model that was run before parallelize, and whose output is kept, is refused",
    ),
    Mutant(
        "rank0-built-modules-replaced-unseen",
        "    refuse_to_replace(module)\n    held",
        "    held",
        "tests/parallel/test_shared_memory.py -k rank_0",
        "weights tied by .data in a model that rank 0 alone builds come apart",
    ),
    Mutant(
        "gather-of-other-rows-as-torch",
        "    handlers[_aten.gather.default] = _taken\n",
        "",
        "tests/step/test_penalty_losses.py",
        "gather and scatter by places of fewer rows than a cut parameter has take the rows of another rank",
    ),
)

EQUIVALENT: Mapping[str, str] = {
    "search-sees-one-forward": "the proof of the whole model runs a second forward too",
    "tp-torchs-kernel-on-parts": "layers that are cut have hooks of their own, which keep that kernel away as well",
}
"""Names of mutants that no test can tell from the library -> why."""


# ---- where they are --------------------------------------------------------------------------------------------------


def sources(root: Path = ROOT) -> dict[Path, str]:
    """Path below ``root`` -> text, of every module of the package."""
    found = sorted((root / PACKAGE).rglob("*.py"))
    return {path.relative_to(root): path.read_text(encoding="utf-8") for path in found}


def misplaced(root: Path = ROOT) -> list[str]:
    """What is wrong with the list, a line per fault: snippets that are gone or not unique, code that would not parse, tests
    that are not there, names given twice."""
    texts, faults = sources(root), []
    names = [mutant.name for mutant in MUTANTS]
    faults += [f"{name}: two mutants of this name" for name in sorted({n for n in names if names.count(n) > 1})]
    faults += [f"{name}: in EQUIVALENT, and no mutant" for name in EQUIVALENT if name not in names]
    for mutant in MUTANTS:
        places = {path: text.count(mutant.before) for path, text in texts.items() if mutant.before in text}
        if sum(places.values()) != 1:
            shown = ", ".join(f"{path} ({number})" for path, number in places.items()) or "nowhere"
            faults.append(f"{mutant.name}: its snippet is to be found once, and is {shown}")
            continue
        (path,) = places
        try:
            ast.parse(texts[path].replace(mutant.before, mutant.after))
        except SyntaxError as error:
            faults.append(f"{mutant.name}: {path} would not parse, line {error.lineno}")
    faults += [f"{mutant.name}: {fault}" for mutant in MUTANTS for fault in _absent_tests(mutant, root)]
    return faults


def _absent_tests(mutant: Mutant, root: Path) -> Iterator[str]:
    for place in (word for word in shlex.split(mutant.tests) if word.startswith("tests/")):
        path, _, name = place.partition("::")
        if not (root / path).exists():
            yield f"there is no {path}"
        elif name and f"def {name.partition('[')[0]}(" not in (root / path).read_text(encoding="utf-8"):
            yield f"there is no {name} in {path}"


def room_of(mutant: Mutant, texts: Mapping[Path, str]) -> str:
    """The folder of the package where the mutant's snippet is, or the module right under it."""
    return _place_of(mutant, texts).relative_to(PACKAGE).parts[0].removesuffix(".py")


def _place_of(mutant: Mutant, texts: Mapping[Path, str]) -> Path:
    return next(path for path, text in texts.items() if mutant.before in text)


# ---- running them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of one mutant.

    Attributes:
        mutant: which.
        room: the part of the library that it is in.
        kind: "killed", "survived", or "broken": the mutant itself is badly written, or its tests cannot be run.
        by: the test that noticed it, or what is wrong.
        seconds: how long that took.
    """

    mutant: Mutant
    room: str
    kind: str
    by: str
    seconds: float

    def __str__(self) -> str:
        how = {"killed": f"killed by {self.by}", "survived": "SURVIVED", "broken": f"BROKEN: {self.by}"}[self.kind]
        return f"{self.room:10} {self.mutant.name:36} {how} ({self.seconds:.0f} s)"


class _Copy:
    """A copy of the tree as git sees it, in which one mutant lives at a time."""

    def __init__(self, folder: Path):
        self.root = folder
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # a file that was removed and not committed is still listed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self._texts = sources(folder)
        self._env = {
            **os.environ,
            # Before what is installed, for ranks and commands too.
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        flag = subprocess.run(
            [sys.executable, "tools/plugin_flag.py"],
            cwd=folder,
            env=self._env,
            capture_output=True,
            text=True,
            check=True,
        )
        self._plugin = flag.stdout.split()

    def outcome(self, mutant: Mutant) -> Outcome:
        """Runs the mutant's tests with it in place."""
        path = _place_of(mutant, self._texts)
        text, start = self._texts[path], time.monotonic()
        (self.root / path).write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
        try:
            kind, by = self._run(shlex.split(mutant.tests))
        finally:
            (self.root / path).write_text(text, encoding="utf-8")
        return Outcome(mutant, room_of(mutant, self._texts), kind, by, time.monotonic() - start)

    def _run(self, tests: Sequence[str]) -> tuple[str, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "200"]
        command += ["-m", "not soak and not gpu", *self._plugin, *tests]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            process = subprocess.Popen(
                command, cwd=self.root, env=self._env, stdout=printed, stderr=printed, text=True, start_new_session=True
            )
            try:
                status = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                return "killed", "time"
            finally:
                _end(process)
            printed.seek(0)
            return _read(status, printed.read())


def _end(process: subprocess.Popen[str]) -> None:
    """Ends pytest and what it started: ranks have sessions of their own, and end with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


_SLIPS = re.compile(r"\b(NameError|ImportError|ModuleNotFoundError|SyntaxError): .*")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", re.MULTILINE)


def _read(status: int, printed: str) -> tuple[str, str]:
    """``(kind, by)`` from what pytest printed."""
    if status == 0:
        return "survived", ""
    slip, failed = _SLIPS.search(printed), _FAILED.search(printed)
    if status != 1 or slip is not None or failed is None:
        last = (printed.strip().splitlines() or ["nothing was printed"])[-1]
        return "broken", slip[0] if slip is not None else f"pytest ended with status {status}: {last}"
    return "killed", failed[1]


def _outcomes(mutants: Iterable[Mutant], jobs: int) -> Iterator[Outcome]:
    """Of each mutant, in their order."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        idle: SimpleQueue[_Copy] = SimpleQueue()
        for number in range(jobs):
            idle.put(_Copy(Path(folder) / str(number)))

        def run(mutant: Mutant) -> Outcome:
            copy = idle.get()
            try:
                return copy.outcome(mutant)
            finally:
                idle.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            yield from pool.map(run, mutants)


# ---- the page --------------------------------------------------------------------------------------------------------

_HEAD = """# Mutants: which breaks the tests notice

Written by `python tools/mutants.py --write`. Each row is one small change of the library's code that a careless hand could make, with
what it would do to a user, and the test that fails by it. A mutant is found by its text, so files may move; the tests that the list
names for it run against a copy in which nothing else is changed. Where none of them fails the row says **nothing**: a test is missing.

"""


def _page(outcomes: Sequence[Outcome]) -> str:
    rows = ["| room | mutant | what it would do | killed by |", "|---|---|---|---|"]
    rooms = list(dict.fromkeys(outcome.room for outcome in outcomes))
    for outcome in sorted(outcomes, key=lambda outcome: rooms.index(outcome.room)):
        rows.append(f"| {outcome.room} | {outcome.mutant.name} | {outcome.mutant.why} | {_killer(outcome)} |")
    totals = ["| room | mutants | killed | survived |", "|---|---|---|---|"]
    for room in (*rooms, "all"):
        of_room = [outcome for outcome in outcomes if room in (outcome.room, "all")]
        killed = sum(outcome.kind == "killed" for outcome in of_room)
        totals.append(f"| {room} | {len(of_room)} | {killed} | {len(of_room) - killed} |")
    seconds = sum(outcome.seconds for outcome in outcomes)
    return (
        _HEAD + "\n".join(rows) + "\n\n" + "\n".join(totals) + f"\n\nThe tests of all of them took {seconds:.0f} s.\n"
    )


def _killer(outcome: Outcome) -> str:
    if outcome.kind == "killed" and outcome.by.startswith("tests/"):
        test, bracket, case = outcome.by.removeprefix("tests/").partition("[")
        is_short = len(case) <= 40 and not set(case) & set("|`\\")  # else it says nothing, or breaks the table
        return f"`{test}{bracket}{case}`" if is_short else f"`{test}`"
    if outcome.kind == "killed":
        return outcome.by
    equal = EQUIVALENT.get(outcome.mutant.name)
    return f"nothing can: {equal}" if equal is not None else "**nothing**"


def main() -> int:
    """Runs the mutants that are asked for. Returns the exit status: 1 if one survived that a test could tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these only; nothing is written")
    parser.add_argument("--list", action="store_true", help="name them, and what each would do")
    parser.add_argument("--check", action="store_true", help="only see that every snippet is there once")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time (1)")
    given = parser.parse_args()
    unknown = set(given.only or ()) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    faults = misplaced()
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults or given.check:
        return 1 if faults else 0
    texts = sources()
    chosen = [mutant for mutant in MUTANTS if given.only is None or mutant.name in given.only]
    if given.list:
        for mutant in chosen:
            print(f"{room_of(mutant, texts):10} {mutant.name:36} {mutant.why}")
        return 0
    outcomes = []
    for outcome in _outcomes(chosen, max(1, given.jobs)):
        print(outcome, flush=True)
        outcomes.append(outcome)
    bad = [outcome for outcome in outcomes if outcome.kind != "killed" and outcome.mutant.name not in EQUIVALENT]
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"{len(outcomes)} mutants, {len(outcomes) - len(bad)} killed or equivalent, {seconds:.0f} s of tests")
    if given.write and given.only is None and not any(outcome.kind == "broken" for outcome in outcomes):
        from stamp import stamped

        (ROOT / PAGE).write_text(stamped(PAGE, _page(outcomes)), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
