#!/usr/bin/env bash
# FP8 recipes per module, `mpguard sensitivity` and `watch: full` on a GPU: 7 minutes on one H100 or H200.
#   bash benchmarks/gpu_numerics.sh [FOLDER]     PYTHON=... for another interpreter
# FOLDER (build/gpu_numerics) gets a file for each part, and gpu_numerics.json: what each part printed, the card, the
# versions and the date. A part that fails does not end the others.
out=${1:-build/gpu_numerics}; python=${PYTHON:-python}; mkdir -p "$out"
cd "$(dirname "$0")/.." || exit 1
part() {  # NAME SECONDS COMMAND...
  local name=$1 limit=$2 status; shift 2
  local began=$SECONDS
  timeout "$limit" "$@" >"$out/$name.txt" 2>&1
  status=$?
  echo "$name $status $((SECONDS - began))" >>"$out/parts"
  echo "== $name: status $status after $((SECONDS - began)) s"
  tail -n "${LINES_SHOWN:-30}" "$out/$name.txt"
}
rm -f "$out/parts"
part tests 120 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_fp8_modules_gpu.py tests/gpu/test_watch_gpu.py
"$python" -m mpguard init hopper_bf16_with_fp8_mixed --strategy single -o "$out/mp.yaml" --force >"$out/init.txt"
part sensitivity 100 "$python" -m mpguard sensitivity --config "$out/mp.yaml" --steps 8 examples/train_torch.py --steps 1000
part sensitivity_cost 60 "$python" benchmarks/sensitivity.py cost --width 1024 --blocks 8 --tokens 4096
watch=("$python" benchmarks/watch.py --fp8 tensorwise --compile --blocks 4 --width 2048 --tokens 4096 --rounds 2)
part watch_first_steps 120 "${watch[@]}" --output "$out/watch_first_steps.json"
part watch_later_steps 150 "${watch[@]}" --warmup 100 --steps 100 --output "$out/watch_later_steps.json"
"$python" - "$out" <<'P'
import datetime, importlib.metadata, json, pathlib, sys

import torch

folder = pathlib.Path(sys.argv[1])
parts = {}
for line in (folder / "parts").read_text().splitlines():
    name, status, seconds = line.split()
    printed = (folder / f"{name}.txt").read_text(errors="replace").splitlines()[-30:]
    measured = folder / f"{name}.json"
    parts[name] = {"status": int(status), "seconds": int(seconds), "printed": printed}
    if measured.exists():
        parts[name]["measured"] = json.loads(measured.read_text())
names = ("mpguard", "torch", "torchao", "transformer-engine", "transformers")
report = {
    "what": "bash benchmarks/gpu_numerics.sh",
    "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    "hardware": {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None},
    "versions": {name: importlib.metadata.version(name) for name in names},
    "parts": parts,
}
(folder / "gpu_numerics.json").write_text(json.dumps(report, indent=1) + "\n")
P
