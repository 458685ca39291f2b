#!/usr/bin/env bash
# Usage: tools/beside.sh PYTHON VENV
# Installs normlab beside transformers, TRL, Lightning and datasets, as in an environment that somebody works in,
# and says what that changes: PYTHON lends its torch, so that none is fetched, and VENV is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."

lender=${1:?usage: tools/beside.sh PYTHON VENV} venv=${2:?usage: tools/beside.sh PYTHON VENV}

rm -rf "$venv"
"$lender" -m venv "$venv"
python=$venv/bin/python
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$lender" tools/lend_torch.py "$venv/lent"
echo "$(cd "$venv" && pwd)/lent" >"$site/lent-torch.pth"

install() { "$python" -m pip install -qq --disable-pip-version-check "$@"; }

install transformers trl lightning datasets
"$python" tools/beside_check.py before "$venv/before.json"
install .
"$python" tools/beside_check.py after "$venv/before.json"
for extra in charts lab; do
    "$python" tools/beside_check.py before "$venv/$extra.json"
    install ".[$extra]"
    "$python" tools/beside_check.py sizes "$venv/$extra.json" "$extra"
done
