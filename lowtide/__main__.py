"""`python -m lowtide`, the same as the command `lowtide`."""

from __future__ import annotations

import sys

from lowtide.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
