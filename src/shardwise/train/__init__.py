"""Training. Nothing is imported here: the command line looks at some of these files before it knows torch.

From a batch to an update, each in the file of its name: :mod:`batch <shardwise.train.batch>` and
:mod:`data <shardwise.train.data>` (the global order of samples, dealt to ranks), :mod:`loss <shardwise.train.loss>` (the
contract), :mod:`window <shardwise.train.window>` (the micro-batches of one step), :mod:`exchange
<shardwise.train.exchange>` and :mod:`norm <shardwise.train.norm>` (what ranks agree on before it),
:mod:`step <shardwise.train.step>`, :mod:`optim <shardwise.train.optim>`, :mod:`evaluate <shardwise.train.evaluate>`.

The job of ``shardwise train`` is built on top of them: :mod:`job <shardwise.train.job>`, its
:mod:`parts <shardwise.train.parts>`, :mod:`corpus <shardwise.train.corpus>`, :mod:`metrics <shardwise.train.metrics>`,
:mod:`plot <shardwise.train.plot>`, :mod:`sample <shardwise.train.sample>` and the :mod:`reference
<shardwise.train.reference>` model.
"""
