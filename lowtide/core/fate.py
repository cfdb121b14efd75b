"""The two small vocabularies that everything else is written in: what happens to an activation, and where it lives."""

from __future__ import annotations

import enum


class Fate(enum.StrEnum):
    """What happens to a saved activation between the forward and the backward pass."""

    KEEP = "keep"
    """It stays on the device. Costs memory."""
    SWAP = "swap"
    """It is copied to a slower tier and fetched back before it is needed. Costs link time, free while hidden."""
    RECOMPUTE = "recompute"
    """It is dropped, and computed again in backward. Costs compute time."""


class Tier(enum.StrEnum):
    """Where bytes live, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
