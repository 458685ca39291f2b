"""``python -m normlab``, and so ``torchrun -m normlab``: the command ``normlab``."""

import sys
from pathlib import Path

if not sys.flags.safe_path and sys.path[:1] == [str(Path.cwd())]:
    del sys.path[0]  # -m puts the current directory there: files in it would be imported instead of libraries

from normlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
