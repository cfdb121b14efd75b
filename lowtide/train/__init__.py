"""The reference trainer: small models, a text file, checkpoints that are whole or not there.

Start at `loop.py`; `run_file.py` is the file of settings.
May import: the public surface and everything below.
Must not: be imported by anything but `cli`.
"""
