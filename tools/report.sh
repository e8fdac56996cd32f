#!/usr/bin/env bash
# What this package does on a GPU, for an issue: the environment, the tests, a quick benchmark.
# make report runs it with the programs of its environment. Arguments are pytest's. It fails if the
# tests or the benchmark fail, and the tests do not stop the benchmark.
set -uo pipefail
cd "$(dirname "$0")/.."
# In the source tree Python would import what is built there, if anything is.
readonly FACTS='import maxunpool_cuda, torch
print(maxunpool_cuda.build_info())
print("PyTorch sees a GPU." if torch.cuda.is_available() else "No GPU: PyTorch sees none.")'

report() {
    local status=0
    git log -1 --oneline
    python -m torch.utils.collect_env
    (cd / && python -c "$FACTS")
    OMP_WAIT_POLICY=passive pytest -n 2 --dist loadfile -m cuda "$@" || status=1
    python -m benchmarks time --quick || status=1
    return $status
}

echo "The environment, the tests for a GPU and a quick benchmark, in some ten minutes."
mkdir -p out
report "$@" 2>&1 | tee out/gpu-report.txt
status=$?
echo "Written: out/gpu-report.txt. Please read it, then paste or attach it to a new issue."
exit $status
