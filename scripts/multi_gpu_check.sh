#!/usr/bin/env bash
# What only a machine with several GPUs can say: parallel layers over NCCL against one rank, and how
# steps and layers scale. Answers of the cases and rows of the benchmark go to benchmarks/.
#
#   scripts/multi_gpu_check.sh [python]      with 2, 4 or 8 GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${1:-python}

GPUS=$("$PY" -c "import torch; print(torch.cuda.device_count())")
if [ "$GPUS" -lt 2 ]; then
    echo "this machine has $GPUS GPU(s); pytest tests/functional lets ranks share one, over gloo" >&2
    exit 2
fi
run() { "$PY" -m torch.distributed.run --standalone --nproc-per-node="$@"; }

failed=0
for ranks in 2 4 8; do
    [ "$ranks" -le "$GPUS" ] || continue
    for dtype in fp32 bf16; do
        run "$ranks" tests/functional/parity.py --dtype "$dtype" \
            --report "benchmarks/parity_${ranks}_${dtype}.json" || failed=1
    done
done
if [ "$GPUS" -ge 4 ]; then
    run 4 tests/functional/dcp.py || failed=1
    run 4 tests/functional/cached.py || failed=1
fi
for ranks in 1 2 4 8; do
    [ "$ranks" -le "$GPUS" ] || continue
    run "$ranks" scripts/bench/parallel.py || failed=1
done
exit "$failed"
