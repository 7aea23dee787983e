"""One optimizer step over several micro-batches (a window): gradient accumulation, loss, gradient clipping, loss
scaling, the exchanges between ranks, evaluation.

Start reading at :mod:`step <shardwise.step.step>`: ``TrainStep``, whose parts each have a file of their name.
"""
