#!/usr/bin/env bash
# Serve a configuration, put load on it at several concurrencies, stop it again.
#
#   benchmark/run_benchmark.sh [CONFIG]        CONFIG as for `mstar serve`; smollm2
#
# Environment:
#   CONCURRENCIES="1 8 32"   closed loops, one after the other
#   REQUESTS_PER_CLIENT=4    requests of a run = this x concurrency
#   INPUT_TOKENS=128 OUTPUT_TOKENS=128
#   SERVE_ARGS=""            more arguments of `mstar serve`, e.g. "--set scheduler.async_scheduling=false"
#   RUNNER_ARGS=""           more arguments of `benchmark.runner`, e.g. "--api completions"
#   OUT=benchmark/results    folder of the JSON files, CONFIG-cN.json
#   PYTHON=python            interpreter that has mstar
set -euo pipefail
cd "$(dirname "$0")/.."

config="${1:-smollm2}"
name="$(basename "$config" .yaml)"
out="${OUT:-benchmark/results}"
python="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
mkdir -p "$out"

port="$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
url="http://127.0.0.1:$port"
log="$out/$name-server.log"

# shellcheck disable=SC2086
"$python" -c "from mstar.cli import main; main()" serve "$config" --host 127.0.0.1 --port "$port" ${SERVE_ARGS:-} >"$log" 2>&1 &
server=$!
stop() {
  if kill -0 "$server" 2>/dev/null; then
    kill -TERM "$server"
    wait "$server" || true
  fi
}
trap stop EXIT

echo "starting $config at $url (log: $log)"
until "$python" -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=2)' "$url/ready" 2>/dev/null; do
  if ! kill -0 "$server" 2>/dev/null; then
    echo "the server ended before it was ready:" >&2
    tail -n 20 "$log" >&2
    exit 1
  fi
  sleep 0.5
done

for concurrency in ${CONCURRENCIES:-1 8 32}; do
  file="$out/$name-c$concurrency.json"
  # shellcheck disable=SC2086
  "$python" -m benchmark.runner --url "$url" --load closed --concurrency "$concurrency" \
    --requests "$((concurrency * ${REQUESTS_PER_CLIENT:-4}))" --warmup "$concurrency" \
    --input-tokens "${INPUT_TOKENS:-128}" --output-tokens "${OUTPUT_TOKENS:-128}" --seed "$concurrency" \
    --json ${RUNNER_ARGS:-} >"$file.part"
  mv "$file.part" "$file"
  "$python" - "$concurrency" "$file" <<'PY'
import json, sys
report = json.load(open(sys.argv[2]))
ms = lambda name: "{p50:.1f}/{p99:.1f}".format(**report[name]) if report[name] else "-"
print(f"{sys.argv[1]:>4} at once: {report['output_tok_s']:9.1f} tok/s  ttft {ms('ttft_ms')}  itl {ms('itl_ms')}  "
      f"e2e {ms('e2e_ms')} ms (p50/p99)  failed {report['failed']}  -> {sys.argv[2]}")
PY
done
