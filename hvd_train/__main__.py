"""`python -m hvd_train`: the same as `hvd-train`, for those who have not put it on their PATH."""

from __future__ import annotations

import sys

from hvd_train.cli import main
from hvd_train.console import PROGRAM

if __name__ == "__main__":
    sys.argv[0] = PROGRAM  # which a run writes down as its command
    main()
