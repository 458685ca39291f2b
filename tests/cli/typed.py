"""The command line as a user types it, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import forked

NORMLAB = [sys.executable, "-c", "import sys; from normlab.cli.main import main; sys.exit(main())"]
TINY = (
    "--steps 30 --validate-every-steps 15 --dim 32 --ffn-dim 64 --heads 2 "
    "--encoder-layers 1 --decoder-layers 1 --max-tokens 1024 --precision fp32 --threads 1"
).split()


def normlab(*args, cwd, env=None, input=""):  # noqa: A002 (subprocess's name)
    """What a command says and how it ends; its process need not load torch, which its parent has loaded."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(input)
        code = forked.exit_code(_type, *args, cwd=cwd, env=env or os.environ, files=files)
        said = [file.read_text() for file in files[1:]]
    return subprocess.CompletedProcess(["normlab", *args], code, *said)


def _type(*args):
    sys.argv, sys.path = ["normlab", *map(str, args)], ["", *sys.path]
    from normlab.cli.main import main

    sys.exit(main())
