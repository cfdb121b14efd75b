"""The one exception type that users are meant to read.

Every user-facing mistake (a wrong key, a pattern that matches nothing, a tier that cannot be written) raises
`ConfigError` with a text that says where, what, and how to fix it. Programmer errors are `assert`s instead.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake in what the user asked for. The text is one message: where, what, how to fix."""
