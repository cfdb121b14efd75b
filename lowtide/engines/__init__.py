"""How bytes leave the device and come back: the few calls, lanes, events and copies.

Start at `base.py`, the calls that every engine has; `choose.py` finds the one for a device.
May import: `tensors`, `timeline`, `core`, `errors`, `units`; `tiers/` is where the bytes go.
Must not: decide what moves or when. An engine keeps the order of its copies, and no more.
"""
