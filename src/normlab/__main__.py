"""``python -m normlab``, and so ``torchrun -m normlab``: the command ``normlab``."""

import sys

from normlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
