"""The loss over a vocabulary, in slices of rows, with the bits of the whole.

Start at `cross_entropy.py`, the loss itself; `head.py` takes the head with it, in blocks, and `layers.py` the layers.
`attach.py` puts it in place of the loss of a model of transformers; `checked.py` is for training loops of one's own.
May import: tensors, core, errors. Must not: change what a loss is; decide where memory goes.
"""
