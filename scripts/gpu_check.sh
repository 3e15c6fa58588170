#!/usr/bin/env bash
# What only a machine with GPUs can say of the kernels: bits in every dtype, sanitizers, times.
#
#   scripts/gpu_check.sh [python]      about 10 minutes; rows of the benchmarks go to benchmarks/
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${1:-python}

"$PY" -m pytest -q tests/unit/kernels tests/unit/test_fusions.py tests/unit/test_selection.py
"$PY" -m pytest -q tests/unit/attention tests/unit/test_golden.py tests/functional
"$PY" -m tests.helpers.exercise_kernels
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1) &&
    [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        "$sanitizer" --tool "$tool" --error-exitcode 1 "$PY" -m tests.helpers.exercise_kernels
    done
else
    echo "compute-sanitizer is not here: memory and races are not checked" >&2
fi
"$PY" scripts/bench/rope.py --no-tests
"$PY" scripts/bench/layer.py
