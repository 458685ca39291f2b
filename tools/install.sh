#!/usr/bin/env bash
# Usage: [PYTHON=python3.12] tools/install.sh VENV [EXTRA]
# Makes the virtual environment and installs normlab, pinned by constraints.txt, with EXTRA: the developer
# tools by default, nothing more if it is empty.
# A torch (2.9 and up) that is already there, in VENV or in $PYTHON, is used as it is, without our pin for it.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:?usage: tools/install.sh VENV [EXTRA]} extra=${2-dev}

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

torch_of() { # VERSION FOLDER of an interpreter's torch, nothing where there is none that fits
    "$1" - 2>/dev/null <<'EOP' || true
from importlib.metadata import distribution
torch = distribution("torch")
if tuple(int(part) for part in torch.version.split(".")[:2]) >= (2, 9):
    print(torch.version, torch.locate_file("").resolve())
EOP
}

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if fits "$candidate"; then python=$candidate && break; fi
    done
fi
if ! fits "${python:-python3}"; then
    echo "normlab needs Python 3.11, 3.12 or 3.13; ${python:-python3} is not one of them." \
        "Name one: make PYTHON=/path/to/python3.12" >&2
    exit 2
fi

if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
    read -r _ folder <<<"$(torch_of "$python")"
    if [ -n "$folder" ]; then # a path file lends the environment the packages around that torch
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "$folder" >"$site/torch-of-$(basename "$python").pth"
    fi
fi

read -r torch _ <<<"$(torch_of "$venv/bin/python")"
pins=$venv/constraints.txt
if [ -n "$torch" ]; then
    sed '/^# torch/,$d' constraints.txt >"$pins"
    echo "torch==$torch" >>"$pins"
else
    cp constraints.txt "$pins"
fi

echo "installing normlab into $venv with $("$venv/bin/python" --version)${torch:+ and the torch $torch that is there}"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$pins" -e ".${extra:+[$extra]}"
