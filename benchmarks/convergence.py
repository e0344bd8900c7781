"""Does FP8 train as BF16 does? A GPT of 113 million parameters on the source of Python's standard library.

    python benchmarks/convergence.py run --output benchmarks/results/convergence.json    # one Hopper GPU, 5 minutes
    python benchmarks/convergence.py run --tiny --output FILE                            # tries the program on a CPU
    python benchmarks/convergence.py plot benchmarks/results/convergence.json docs/convergence.svg

Each arm is a run of this file through `mpguard launch` with a policy of its own; all have the same weights at the start
and the same batches in the same order. Tokens are bytes. One arm repeats BF16 with starting weights that differ by
1e-6: what chaos alone does. The arms share the GPU, since only their losses count. An arm is written as soon as it has
ended, and one that the file already has is not trained again.

Verdicts are those of `mpguard compare`, in its own window and on the last 500 steps; the mean difference of the last
200 is given with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "transformers", "accelerate", "torchao", "triton", "mpguard")

FP8 = "bf16_with_fp8_current_scaling_mixed"
DELAYED = "bf16_with_fp8_delayed_scaling_mixed"
OPT_INS = {"fp8_head": True, "fp8_fast_accum": True, "master_weights": "optimizer"}

#: Name -> recipe and overrides, the most telling first. The first is the baseline.
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16_mixed", {}),
    "fp8": (FP8, {}),
    "fp8, all opt-ins": (FP8, OPT_INS),
    "fp8, fp8_head": (FP8, {"fp8_head": True}),
    "fp8, fp8_fast_accum": (FP8, {"fp8_fast_accum": True}),
    "fp8, master_weights: optimizer": (FP8, {"master_weights": "optimizer"}),
    "bf16, weights changed by 1e-6": ("bf16_mixed", {}),
    "fp8 delayed": (DELAYED, {"compile": False}),
    "fp8 delayed, fp8_calibration": (DELAYED, {"compile": False, "fp8_calibration": True}),
}
BASELINE, CHANGED = "bf16", "bf16, weights changed by 1e-6"


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all arms have in common: the model, the batches and the schedule."""

    blocks: int = 12
    width: int = 768
    inner: int = 3072
    heads: int = 12
    batch: int = 8
    length: int = 512
    steps: int = 2000
    rate: float = 6e-4
    warm_up: int = 100


TINY = Setup(blocks=4, width=64, inner=128, heads=4, batch=4, length=64, steps=20, warm_up=5)

#: The last steps that are judged: by the test of `mpguard compare`, which needs 20 blocks of 25, and by their mean.
JUDGED, LAST = 500, 200

#: Steps between two writes of losses.
WRITE_EVERY = 50


def text() -> bytes:
    """Return the source of the standard library without its tests, in the order of the files' names."""
    folder = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [path for path in folder.rglob("*.py") if not left_out & set(path.relative_to(folder).parts)]
    return b"\n".join(path.read_bytes() for path in sorted(files))


# -- one arm -----------------------------------------------------------------------------------------------------------


def train(setup: Setup, losses: Path, changed: bool) -> None:
    """Train, and write a line per step."""
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator: Any = Accelerator()
    device = accelerator.device
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=setup.width, intermediate_size=setup.inner, num_hidden_layers=setup.blocks, vocab_size=256,
        num_attention_heads=setup.heads, num_key_value_heads=setup.heads, max_position_embeddings=setup.length,
        use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).train()
    if changed:
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=draw))
    model.to(device)
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=setup.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, setup))
    model, optimizer = accelerator.prepare(model, optimizer)

    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).to(device)
    windows = len(data) // setup.length
    order = torch.randperm(windows, generator=torch.Generator().manual_seed(1)).tolist()
    rows: list[tuple[Any, Any, float]] = []
    began = time.perf_counter()
    with losses.open("w", encoding="utf-8") as log:
        for step in range(setup.steps):
            own = [order[(step * setup.batch + row) % windows] for row in range(setup.batch)]
            ids = torch.stack([data[each * setup.length : (each + 1) * setup.length] for each in own]).long()
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            rows.append((loss.detach(), norm, time.perf_counter()))
            if (step + 1) % WRITE_EVERY == 0 or step + 1 == setup.steps:
                for place, (each, its_norm, at) in enumerate(rows, step + 2 - len(rows)):
                    line = {"step": place, "loss": float(each), "grad_norm": float(its_norm), "ms": (at - began) * 1e3}
                    log.write(json.dumps(line) + "\n")
                    began = at
                rows.clear()
                log.flush()
    accelerator.end_training()


def _share(step: int, setup: Setup) -> float:
    """Return the learning rate as a share of the highest: a linear rise, then a cosine to a tenth."""
    if step < setup.warm_up:
        return (step + 1) / setup.warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - setup.warm_up) / (setup.steps - setup.warm_up))


# -- all arms ----------------------------------------------------------------------------------------------------------


class Arm:
    """A process that trains one arm, and its files."""

    def __init__(self, name: str, setup: Setup, folder: Path, cpu: bool) -> None:
        self.name, self.began = name, time.monotonic()
        self.folder = folder / name.replace(" ", "_").replace(":", "").replace(",", "")
        self.folder.mkdir()
        self.losses, self.proof = self.folder / "losses.jsonl", self.folder / "proof.json"
        self.watch, self.output = self.folder / "watch.jsonl", self.folder / "output"
        config = self._config(cpu)
        words = [
            sys.executable, "-W", "ignore", "-m", "mpguard", "launch", "--config", str(config), "--enforce", "warn",
            "--proof-json", str(self.proof), "--watch-json", str(self.watch), __file__, "train", str(self.losses),
            "--setup", json.dumps(dataclasses.asdict(setup)), *(["--changed"] if name == CHANGED else []),
        ]  # fmt: skip
        path = os.pathsep.join((str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")))
        environment = {
            "OMP_NUM_THREADS": "2", **os.environ, "PYTHONPATH": path, "NO_COLOR": "1",
            "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_COMPILE_THREADS": "4",
        }  # fmt: skip
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=out, cwd=self.folder, env=environment, start_new_session=True
            )

    def _config(self, cpu: bool) -> Path:
        """Write the mp.yaml of the arm."""
        recipe, overrides = ARMS[self.name]
        overrides = {"compile": not cpu, **overrides}
        if cpu and recipe == FP8:
            overrides |= {"backend": "torchao", "fp8_emulate": True}
        config = {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_machines": 1, "num_processes": 1,
            "mixed_precision": "fp8" if recipe in (FP8, DELAYED) else "bf16", "use_cpu": cpu,
            "fp8_config": {"mpguard_recipe": recipe, "mpguard_overrides": overrides},
        }  # fmt: skip
        path = self.folder / "mp.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        return path

    def result(self) -> dict[str, Any]:
        """Return what the arm gave: its losses, or why it has none."""
        recipe, overrides = ARMS[self.name]
        rows = [json.loads(line) for line in self.losses.read_text().splitlines()] if self.losses.exists() else []
        found: dict[str, Any] = {
            "recipe": recipe,
            "overrides": overrides,
            "status": self.process.returncode,
            "seconds": round(time.monotonic() - self.began),
        }
        if self.process.returncode != 0:
            return found | {"failed": self.output.read_text(errors="replace")[-2000:], "steps": len(rows)}
        proof = json.loads(self.proof.read_text()) if self.proof.exists() else {}
        names = ("fp8", "fp8 products", "fp8 head", "fp8 calibration", "parameters", "compile", "attention mask")
        found["proof"] = {
            "verdict": proof.get("verdict"),
            "failures": proof.get("failures", []),
            "rows": {row["name"]: row["found"] for row in proof.get("rows", ()) if row["name"] in names},
        }
        lines = self.watch.read_text().splitlines() if self.watch.exists() else []
        kinds = [json.loads(line)["event"] for line in lines]
        found["events"] = {kind: kinds.count(kind) for kind in sorted(set(kinds) - {"run", "step", "underflow_shares"})}
        found["device"] = _device()
        found["loss"] = [round(row["loss"], 4) for row in rows]
        return found

    def end(self) -> None:
        """End the process and those that it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(setup: Setup, options: argparse.Namespace) -> int:
    """Train the arms that the file has not, write each as it ends, and judge them."""
    import torch

    cpu = not torch.cuda.is_available()
    data = text()
    head = {
        "setup": dataclasses.asdict(setup),
        "text": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
        "versions": {name: _version(name) for name in LIBRARIES},
    }
    result: dict[str, Any] = {**head, "arms": {}}
    if options.output.exists():
        old = json.loads(options.output.read_text(encoding="utf-8"))
        if all(old.get(key) == value for key, value in head.items()):
            result["arms"] = {name: each for name, each in old["arms"].items() if "loss" in each}
    here = [name for name, (recipe, _) in ARMS.items() if not (cpu and recipe == DELAYED)]  # it needs a GPU
    waiting = [name for name in here if name not in result["arms"] and (not options.only or name in options.only)]
    began, running = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(prefix="convergence-"))
    try:
        while waiting or running:
            while waiting and len(running) < options.at_once:
                running.append(Arm(waiting.pop(0), setup, folder, cpu))
            time.sleep(0.5)
            if time.monotonic() - began > options.budget:
                print(f"stopped after {options.budget:.0f} s", flush=True)
                break
            for arm in [each for each in running if each.process.poll() is not None]:
                running.remove(arm)
                found = result["arms"][arm.name] = arm.result()
                print(f"{arm.name}: {_line(found)}", flush=True)
                _write(result, options.output)
    finally:
        for arm in running:
            arm.end()
        shutil.rmtree(folder, ignore_errors=True)
    _write(result, options.output)
    for name, found in result.get("verdicts", {}).items():
        print(f"{name}: {found}", flush=True)
    return 0 if all("loss" in result["arms"].get(name, {}) for name in here) else 1


def _line(found: Mapping[str, Any]) -> str:
    if "loss" not in found:
        return f"failed with status {found['status']} after {found['steps']} steps: {found['failed'][-600:]}"
    last = found["loss"][-LAST:]
    ran = f"loss {found['loss'][0]:.4f} to {sum(last) / len(last):.4f}, {found['seconds']} s"
    return f"{ran}, {found['proof']['verdict']}, {found['proof']['rows']}, {found['events']}"


def _write(result: dict[str, Any], path: Path) -> None:
    """Write the file with its verdicts, a line per arm, in the order of the plan."""
    result["arms"] = {name: result["arms"][name] for name in ARMS if name in result["arms"]}
    result["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    result["verdicts"] = verdicts({name: each["loss"] for name, each in result["arms"].items() if "loss" in each})
    arms = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in result["arms"].items())
    rest = json.dumps({key: value for key, value in result.items() if key != "arms"}, indent=1)
    new = path.with_name(path.name + ".new")
    new.write_text(f'{rest[:-2]},\n "arms": {{\n{arms}\n }}\n}}\n', encoding="utf-8")
    new.replace(path)


def verdicts(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the verdict of `mpguard compare` on each arm, and the mean difference of the last steps."""
    from mpguard.compare import Criteria, RunLog, WarmUp, compare

    if BASELINE not in losses:
        return {}
    logs = {name: [RunLog(name, Path(name), "jsonl", dict(enumerate(each, 1)))] for name, each in losses.items()}
    steps = len(losses[BASELINE])
    end = WarmUp(share=None, steps=max(0, steps - JUDGED))
    windows = {"whole": Criteria(same_start=True), "end": Criteria(warm_up=end, same_start=True)}
    found: dict[str, Any] = {name: {} for name in losses if name != BASELINE}
    for window, criteria in windows.items():
        for each in compare(logs, BASELINE, criteria).verdicts:
            found[each.name][window] = {
                "verdict": each.verdict, "difference": each.difference and round(each.difference, 6),
                "interval": each.interval and [round(end, 6) for end in each.interval], "window": each.window,
                "method": each.method, "reason": each.reason,
            }  # fmt: skip
    base = sum(losses[BASELINE][-LAST:])
    for name, own in found.items():
        own["last"] = round(sum(losses[name][-LAST:]) / base - 1, 6)
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


# -- the plot ----------------------------------------------------------------------------------------------------------

COLORS = ("#1a1a1a", "#d1495b", "#2e6f95", "#edae49", "#66a182", "#8d6a9f", "#999999", "#5b8e7d", "#b56576")
WIDTH, LEFT, RIGHT, PANEL, TOP = 760, 60, 740, 230, 30
MEANS = 50


def plot(result: Mapping[str, Any]) -> str:
    """Return an SVG: means of 50 steps of the losses, and of their differences from BF16 with the margin."""
    losses = {name: each["loss"] for name, each in result["arms"].items() if "loss" in each}
    base = losses[BASELINE]
    curves = {name: _means(each) for name, each in losses.items()}
    gaps = {
        name: [100 * (own / other - 1) for own, other in zip(curves[name], curves[BASELINE], strict=True)]
        for name in losses
        if name != BASELINE
    }
    height = 2 * (PANEL + TOP) + 30 + 18 * len(losses)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="Losses of {len(losses)} runs, and their differences from BF16">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    low = 0.95 * min(map(min, curves.values()))
    high = max(1.05 * curves[BASELINE][min(2, len(curves[BASELINE]) - 1)], 1.1 * low)  # without the first steps
    parts += [*_frame(TOP, "loss (means of 50 steps)", len(base), (low, high)), *_curves(curves, TOP, (low, high))]
    top, reach = 2 * TOP + PANEL, (-1.0, 1.0)
    above, below = _y(0.5, top, reach), _y(-0.5, top, reach)
    parts.append(f'<rect x="{LEFT}" y="{above}" width="{RIGHT - LEFT}" height="{below - above:.1f}" fill="#e9f0e4"/>')
    parts += _frame(top, "difference from BF16, % (means of 50 steps; margin ± 0.5)", len(base), reach)
    parts += _curves(gaps, top, reach)
    for place, name in enumerate(losses):
        y = 2 * (PANEL + TOP) + 34 + 18 * place
        color = COLORS[list(ARMS).index(name)]
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{y}" y2="{y}" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 32}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _means(losses: Sequence[float]) -> list[float]:
    size = max(1, min(MEANS, len(losses) // 4))
    return [sum(losses[i : i + size]) / size for i in range(0, len(losses) - size + 1, size)]


def _y(value: float, top: int, reach: tuple[float, float]) -> float:
    """Return the height of a value in a panel; one out of reach is at its edge."""
    low, high = reach
    return round(top + PANEL * (1 - (min(max(value, low), high) - low) / (high - low)), 1)


def _frame(top: int, title: str, steps: int, reach: tuple[float, float]) -> list[str]:
    """Return the title of a panel, and its lines with their numbers."""
    parts = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>']
    for place in range(5):
        value = reach[0] + (reach[1] - reach[0]) * place / 4
        y, x = _y(value, top, reach), LEFT + (RIGHT - LEFT) * place / 4
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<text x="{x:.0f}" y="{top + PANEL + 15}" text-anchor="middle">{steps * place // 4}</text>')
    return parts


def _curves(curves: Mapping[str, Sequence[float]], top: int, reach: tuple[float, float]) -> list[str]:
    parts = []
    for name, values in curves.items():
        at = [LEFT + (RIGHT - LEFT) * (i + 0.5) / len(values) for i in range(len(values))]
        points = " ".join(f"{x:.1f},{_y(value, top, reach)}" for x, value in zip(at, values, strict=True))
        color = COLORS[list(ARMS).index(name)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
    return parts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    own = commands.add_parser("run", help="train the arms that the file has not, and judge them")
    own.add_argument("--output", type=Path, required=True)
    own.add_argument("--tiny", action="store_true", help="a tiny model and 20 steps: tries the program itself")
    own.add_argument("--only", nargs="+", choices=ARMS, metavar="ARM", help="these arms")
    own.add_argument("--at-once", type=int, default=len(ARMS), help="arms that train at the same time")
    own.add_argument("--budget", type=float, default=500.0, help="seconds after which what has not ended is stopped")
    drawn = commands.add_parser("plot", help="draw the losses of a result file")
    drawn.add_argument("result", type=Path)
    drawn.add_argument("svg", type=Path)
    arm = commands.add_parser("train", help="train one arm: what `run` launches")
    arm.add_argument("losses", type=Path)
    arm.add_argument("--setup", type=json.loads, required=True)
    arm.add_argument("--changed", action="store_true")
    options = parser.parse_args(arguments)
    if options.command == "train":
        train(Setup(**options.setup), options.losses, options.changed)
        return 0
    if options.command == "plot":
        options.svg.write_text(plot(json.loads(options.result.read_text(encoding="utf-8"))), encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(TINY if options.tiny else Setup(), options)


if __name__ == "__main__":
    sys.exit(main())
