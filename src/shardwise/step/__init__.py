"""One optimizer step: the window of micro-batches, the loss contract, what ranks agree on, clipping, scaling, evaluation.

:mod:`step <shardwise.step.step>` is the table of contents: ``TrainStep`` and its parts, each in the file of its name.
"""
