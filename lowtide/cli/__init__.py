"""The command `lowtide`: one file a command, and one for the short ones.

Start at `main.py`, and at commands.toml, which has all commands and options.
May import: everything. Nothing imports it.
Must not: import torch before a command needs it; `lowtide --help` is quick.
"""
