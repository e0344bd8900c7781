#!/usr/bin/env bash
# FP8 recipes per module, `mpguard sensitivity` and `watch: full` on a GPU: below 4 minutes on one H100.
#   bash benchmarks/gpu_numerics.sh [FOLDER]     PYTHON=... for another interpreter
# FOLDER (build/gpu_numerics) gets a file for each part. A part that fails does not end the others.
out=${1:-build/gpu_numerics}; python=${PYTHON:-python}; mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
part() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2; shift 2
  local began=$SECONDS
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  echo "== $name: status $? after $((SECONDS - began)) s"
  tail -n "${LINES_SHOWN:-30}" "$out/$name.txt"
}
part tests 70 "$python" -m pytest -q -x -p no:cacheprovider tests/gpu/test_fp8_modules_gpu.py
cat >"$out/mp.yaml" <<'YAML'
mixed_precision: fp8
fp8_config:
  backend: AO
  mpguard_recipe: bf16_with_fp8_current_scaling_mixed
  mpguard_overrides: {backend: torchao, first_last_layers_bf16: false}
YAML
part sensitivity 60 "$python" -m mpguard sensitivity --config "$out/mp.yaml" --steps 8 examples/train_torch.py --steps 1000
part sensitivity_cost 40 "$python" benchmarks/sensitivity.py cost --width 1024 --blocks 8 --tokens 4096
part watch_first_steps 60 "$python" benchmarks/watch.py --fp8 tensorwise --compile --blocks 4 --width 2048 --tokens 4096 --rounds 4
part watch_later_steps 40 "$python" benchmarks/watch.py --fp8 tensorwise --compile --blocks 4 --width 2048 --tokens 4096 --rounds 2 --warmup 100 --steps 100
