#!/usr/bin/env bash
# On a machine with the GPU, from the repository's root:  benchmarks/h200/run.sh PEERS OUT [SECTION...]
# Compiles all sections side by side first, then measures them one after the other.
set -u
peers=$1 out=$2; shift 2
export PYTHONPATH=.:backends/triton:conformance TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/m3hal-triton-cache}
sections=("$@"); [ ${#sections[@]} -gt 0 ] || sections=(select_decode sparse_decode prefill insert)
measure() {
  local script="attention.py $1"; [ "$1" != insert ] || script=insert.py
  timeout 200 python3 benchmarks/h200/$script --peers "$peers" --out "$out"
}
for section in "${sections[@]}"; do
  WARM=1 measure "$section" >"$out/warm_$section.log" 2>&1 &
done
wait
for section in "${sections[@]}"; do
  grep -A3 Traceback "$out/warm_$section.log" | head -8
  measure "$section"
done
