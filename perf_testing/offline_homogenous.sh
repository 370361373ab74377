#!/usr/bin/env bash
# Offline throughput of homogenous batches: requests of one shape, all known at the start, no HTTP.
#
#   perf_testing/offline_homogenous.sh [CONFIG]     CONFIG as for `mstar serve`; smollm2
#
# Environment:
#   BATCHES="1 8 32 64"                  requests of a run
#   SHAPES="128:128 512:32"              prompt:output tokens
#   SET="scheduler.async_scheduling=false dtype=float32"    configuration values to change
#   OUT=perf_testing/results             folder of the JSON lines, CONFIG-offline.jsonl
#   PYTHON=python                        interpreter that has mstar
set -euo pipefail
cd "$(dirname "$0")/.."

config="${1:-smollm2}"
out="${OUT:-perf_testing/results}"
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
file="$out/$(basename "$config" .yaml)-offline.jsonl"
mkdir -p "$out"

changes=()
for change in ${SET:-}; do
  changes+=(--set "$change")
done

printf '%8s %8s %8s %10s %14s %14s\n' requests prompt output seconds 'output tok/s' 'total tok/s'
for shape in ${SHAPES:-128:128 512:32}; do
  for batch in ${BATCHES:-1 8 32 64}; do
    line="$("$python" -m benchmark.offline "$config" --requests "$batch" --input-tokens "${shape%%:*}" \
      --output-tokens "${shape##*:}" --json ${changes[@]+"${changes[@]}"} | tail -n 1)"
    echo "$line" >>"$file"
    "$python" - "$line" <<'PY'
import json, sys
r = json.loads(sys.argv[1])
print(f"{r['requests']:>8} {r['input_tokens']:>8} {r['output_tokens']:>8} {r['seconds']:>10.2f} "
      f"{r['output_tok_s']:>14.1f} {r['total_tok_s']:>14.1f}")
PY
  done
done
echo "-> $file"
