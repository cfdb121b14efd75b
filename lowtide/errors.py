"""The one exception type that users are meant to read.

Every user-facing mistake (a wrong key, a pattern that matches nothing, a tier that cannot be written) raises
`ConfigError` with a text that says where, what, and how to fix it. Programmer errors are `assert`s instead.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake in what the user asked for. The text is one message: where, what, how to fix."""


class BudgetError(ConfigError):
    """No plan fits the budget. `floor_bytes` is the smallest peak that can be reached; `suggestions` are the cheapest
    ways out, each one sentence, best first."""

    def __init__(self, message: str, *, floor_bytes: int, suggestions: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.floor_bytes = floor_bytes
        self.suggestions = suggestions
