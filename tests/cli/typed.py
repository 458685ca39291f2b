"""The command line as a user types it, in a process of its own."""

import subprocess
import sys

NORMLAB = [sys.executable, "-c", "import sys; from normlab.cli.main import main; sys.exit(main())"]
TINY = (
    "--steps 30 --validate-every-steps 15 --dim 32 --ffn-dim 64 --heads 2 "
    "--encoder-layers 1 --decoder-layers 1 --max-tokens 1024 --precision fp32 --threads 1"
).split()


def normlab(*args, cwd, **kwargs):
    return subprocess.run([*NORMLAB, *args], cwd=cwd, capture_output=True, text=True, check=False, **kwargs)
