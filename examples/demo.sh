#!/usr/bin/env bash
# Sets up a virtual environment of its own in .venv and runs the demo; arguments go to `oasis demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable .
exec .venv/bin/oasis demo "$@"
