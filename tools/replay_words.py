"""Messages, options' descriptions and output that were reworded: what an older commit said, and what is said now.

``tools/replay.py`` reads the older commit's record with these, so that only what else differs shows.
"""

from typing import Any

__all__ = ["REWORDED", "reworded"]

REWORDED: tuple[tuple[str, str], ...] = (
    # Longest first: a part of one may be another.
    (
        "an exception of its own was caught; from here on every sample would be trained with others than in one process",
        "or caught an exception; from here on samples would be grouped otherwise than in one process",
    ),
    (
        "false: what weights lack is drawn (a new head), what they have besides is left out; both are told",
        "false: missing weights are initialised (a new head), extra ones are left out; both are reported",
    ),
    (
        "go on from the newest checkpoint in log.dir; false: start anew, and move those there aside",
        "resume from the newest checkpoint in log.dir; false: start from the beginning, and move those there aside",
    ),
    (
        "make room, or name a place that can be written; the same command then goes on where it was",
        "free space, or name a place that can be written; the same command then continues where it was",
    ),
    (
        "there is no config.json beside the source: transformers will want one beside the result",
        "there is no config.json next to the source: transformers needs one next to the result",
    ),
    (
        "of its own part, and go on with another one than the others",
        "of its own part, and continue with another value than the others",
    ),
    (
        "is an axis of the design whose technique is not built yet",
        "is a planned axis; its technique does not exist yet",
    ),
    (
        "start anew; default: go on where a killed conversion was",
        "start from the beginning; default: continue a killed conversion",
    ),
    (
        "and beside a shared part every part must divide evenly",
        "and if one part is shared, every part must divide evenly",
    ),
    ("the manifest does not name it: somebody put it there", "the manifest does not name it: it was added later"),
    ("that divides by a number of its own may read it once", "that divides by another number may read it once"),
    ("for want of memory it is the system (see `dmesg`)", "if memory ran out, it was the system (see `dmesg`)"),
    ("if they are meant so, give a count of your own: ", "if this is intended, pass your own count: "),
    ("only a .bin file needs to be told its dtype, so", "only a .bin file needs a dtype, so"),
    ("checkpoints are written while training goes on", "checkpoints are written while training continues"),
    ("the optimizer goes on with the settings it had", "the optimizer keeps the settings it had"),
    ("put the model's config.json beside the weights", "put the model's config.json next to the weights"),
    ("prune: besides, steps that are multiples of it", "prune: also keep steps that are multiples of it"),
    ("besides, those whose step is a multiple of it", "also keep those whose step is a multiple of it"),
    ("uses a parameter beside the model's forward", "uses a parameter outside the model's forward"),
    ("the manifest names it, and it is not there", "the manifest names it, and it is missing"),
    ("speaking to the process that is forked: ", "no connection to the process that is forked: "),
    ("a rank that ends without a word will be ", "a rank that ends without notice will be "),
    ("from which a run that was ended goes on", "from which an ended run resumes"),
    ("no position in the data: it begins anew", "no position in the data: the data starts from the beginning"),
    ("it is a switch here, beside pin_memory", "it is a switch here, next to pin_memory"),
    ("has ended, without a word: the system", "has ended without notice: the system"),
    ("the same command goes on where it was", "the same command continues where it was"),
    ("name another directory to start anew", "name another directory to start from the beginning"),
    ("what a run goes on with is no weight", "training state is not a weight"),
    ("so a copy would train silently wrong", "so a copy would train wrongly without an error"),
    ("which this one has not gone on from", "from which this one was not resumed"),
    ("look for a slip in the path: it is", "check the path: it is"),
    ("private names that are not there: ", "missing private names: "),
    ("started or positioned anew inside", "started or repositioned inside"),
    ("whose checkpoints lie one deeper", "whose checkpoints are in a subfolder"),
    ("random numbers begin anew, since", "random numbers start from their seed, since"),
    ("was given up by the others while", "was reported lost by the others while"),
    ("start anew where log.dir holds", "start from the beginning where log.dir holds"),
    ("begin again when it is at rest", "try again when no program writes to it"),
    ("an empty name is no operator's", "an empty name matches no operator"),
    ("training goes on, its figures", "training continues, its figures"),
    ("and add --fresh to start anew", "and add --fresh to start from the beginning"),
    ("outside of steps begin anew: ", "outside of steps start from their seed: "),
    ("whose weights lie one deeper", "whose weights are in a subfolder"),
    ("save: it saves, and goes on", "save: it saves, and continues"),
    ("look for a slip in the path", "check the path"),
    ("would begin the window anew", "would begin the window again"),
    ("another process is at it: ", "another process is writing it: "),
    ("and no run goes on from it", "and no run can resume from it"),
    ("is no ending that is known", "is not a known ending"),
    ("and will not come any more", "and will not take part again"),
    ("the same command goes on", "the same command resumes"),
    ("go on with what it had: ", "resume with what it had: "),
    ("name a folder of its own", "choose a separate folder"),
    ("--train.steps=N goes on", "--train.steps=N continues"),
    ("if it is not beside SRC", "if it is not next to SRC"),
    ("no regular expression: ", "not a valid regular expression: "),
    ("or start anew: --fresh", "or start from the beginning: --fresh"),
    ("name a place beside it", "choose a path outside it"),
    ("could not leave word (", "could not report why it ends ("),
    ("(--fresh starts anew)", "(--fresh starts from the beginning)"),
    ("training goes on, and", "training continues, and"),
    ("or srun, which say it", "or srun, which set it"),
    ("there is no such way", "init has no such value"),
    ("it was started anew", "it was started from the beginning"),
    ("and it begins anew", "and it starts from the beginning"),
    ("; the run goes on", "; the run continues"),
    ("like go around it", "like bypass it"),
    ("or start anew", "or start from the beginning"),
    ("which lives", "which is still running"),
)


def reworded(fact: Any) -> Any:
    """A fact of the older commit in today's words, keys of mappings too."""
    if isinstance(fact, dict):
        return {reworded(key): reworded(value) for key, value in fact.items()}
    if isinstance(fact, list):
        return [reworded(each) for each in fact]
    if isinstance(fact, str):
        for old, new in REWORDED:
            fact = fact.replace(old, new)
    return fact
