#!/usr/bin/env bash
# Sets up a virtual environment of its own in .venv and runs the test suite; arguments go to pytest.
#   bash tests/run.sh                      everything
#   bash tests/run.sh -m "not real_model"  the quick tests only
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
exec .venv/bin/python -m pytest -n auto --dist loadfile "$@"
