"""The command `lowtide`: one file a command.

Start at `main.py`.
May import: everything. Nothing imports it.
Must not: import torch before a command needs it; `lowtide --help` is quick.
"""
