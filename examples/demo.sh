#!/usr/bin/env bash
# Sets up a virtual environment of its own in .venv and runs the demo; arguments go to `oasis demo`.
set -euo pipefail
root=$(CDPATH="" cd "$(dirname "$0")/.." && pwd) # paths among the arguments are meant from where the user stands
python=${PYTHON:-python3}
if [ ! -x "$root/.venv/bin/python" ]; then
    "$python" -m venv "$root/.venv"
fi
"$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root"
exec "$root/.venv/bin/oasis" demo "$@"
