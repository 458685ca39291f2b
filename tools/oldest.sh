#!/usr/bin/env bash
# Usage: [PYTHON=python3.12] tools/oldest.sh VENV
# Makes VENV with the oldest torch that pyproject.toml allows, and installs normlab there with the developer tools.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: tools/oldest.sh VENV}
oldest=$(sed -n 's/^ *"torch>=\([0-9.]*\)",.*/\1/p' pyproject.toml)

# tools/install.sh keeps a torch that is there already
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check "torch==$oldest"
bash tools/install.sh "$venv"
