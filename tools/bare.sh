#!/usr/bin/env bash
# Usage: tools/bare.sh PYTHON VENV
# Makes an environment as bare as a user's can be, and runs every instrument in it: PYTHON lends its torch and
# what torch itself requires, and normlab is installed with its base dependencies and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."

lender=${1:?usage: tools/bare.sh PYTHON VENV} venv=${2:?usage: tools/bare.sh PYTHON VENV}

rm -rf "$venv"
"$lender" -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Links to single packages: a path file with the lender's whole folder would lend all its neighbours, too.
"$lender" tools/lend_torch.py "$venv/lent"
echo "$(cd "$venv" && pwd)/lent" >"$site/lent-torch.pth"

sed "/^# torch/,\$d" constraints.txt >"$venv/constraints.txt"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$venv/constraints.txt" .
"$venv/bin/python" tools/bare_check.py
