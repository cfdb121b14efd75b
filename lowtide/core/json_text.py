"""JSON text that people may have edited: mistakes are named with line and column."""

from __future__ import annotations

import json
from typing import Any

from lowtide.errors import ConfigError


def parse_json(text: str, what: str, fix: str = "") -> Any:
    """The document of a JSON text. Raises `ConfigError` that starts with `what` (`plan`) and ends with `fix`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}{fix}") from None
    except RecursionError:
        raise ConfigError(f"{what}: not valid JSON: nested too deep{fix}") from None
    except ValueError:
        raise ConfigError(f"{what}: not valid JSON: a number of too many digits{fix}") from None
