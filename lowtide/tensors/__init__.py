"""What a tensor is, and what torch knows of it that it has no public word for.

Start at `private.py`: the only file of the package that names a private symbol of torch or transformers, each with a
test of its own. It says with which versions of torch these tests have passed.
May import: torch, `lowtide.errors`. Must not: know of plans, hooks or engines, or name a fate.
"""
