"""`python -m lowtide`, which is also how `torchrun -m lowtide train run.yaml` starts every rank."""

from __future__ import annotations

import sys

from lowtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
