"""Settings from YAML or from Python values, as frozen dataclasses; each mistake is named with file, line and column.

Start at `memory.py` (the `memory` section); `loader.py` reads any dataclass, `source.py` any file.
May import: `core`, `errors`, `units`.
Must not: import torch, or look at a model.
"""
