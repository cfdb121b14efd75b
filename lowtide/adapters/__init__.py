"""The trainers that people already use: Hugging Face's Trainer, TRL, Lightning, torchtitan.

Each adapter is one thin file: it calls `lowtide.optimize` or `lowtide.apply` at the moment that its trainer has the
model and the optimizer in their final form, and `remove()` when training ends.
Start at `attach.py`, which has what they share; then the file of your trainer.
It may import the public surface of lowtide and, in the file of a trainer, that trainer. Nothing else of lowtide may
import it. It must not plan, observe or patch anything itself.
"""
