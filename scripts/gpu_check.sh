#!/usr/bin/env bash
# What only a machine with GPUs can say of the kernels: bits in every dtype, sanitizers, times.
#
#   scripts/gpu_check.sh [python]      10 to 15 minutes with pytest-xdist, far longer without; rows of
#                                      the benchmarks go to benchmarks/
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${1:-python}

# Every shape is a compilation; with pytest-xdist they do not wait for each other.
ALSO=()
if "$PY" -c "import xdist" 2>/dev/null; then ALSO=(-n 12); fi

"$PY" -m pytest -q tests/unit/kernels/test_gpu.py # alone: it fills the memory
"$PY" -m pytest -q "${ALSO[@]}" tests/unit/kernels tests/unit/test_fusions.py tests/unit/test_selection.py \
    --deselect tests/unit/kernels/test_gpu.py
"$PY" -m pytest -q "${ALSO[@]}" tests/unit/attention tests/unit/parallel tests/unit/test_golden.py
"$PY" -m pytest -q tests/functional
PROGRAMS=(tests.helpers.exercise_kernels tests.helpers.exercise_fp8 tests.helpers.exercise_decode)
for program in "${PROGRAMS[@]}"; do "$PY" -m "$program"; done
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1) &&
    [ -n "$sanitizer" ]; then
    for tool in memcheck racecheck; do
        for program in "${PROGRAMS[@]}"; do
            "$sanitizer" --tool "$tool" --error-exitcode 1 "$PY" -m "$program"
        done
    done
else
    echo "compute-sanitizer is not here: memory and races are not checked" >&2
fi
"$PY" scripts/bench/rope.py --no-tests
"$PY" scripts/bench/dsa.py --no-tests
"$PY" scripts/bench/fp8.py --no-tests
"$PY" scripts/bench/decode.py --no-tests
"$PY" scripts/bench/layer.py
