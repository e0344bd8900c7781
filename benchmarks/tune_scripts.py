"""`mpguard tune`, from its start to the winner, on training scripts that other people wrote, unchanged.

    git clone https://github.com/karpathy/nanoGPT                           # commit 3adf61e154c3
    git clone https://github.com/huggingface/pytorch-image-models          # commit aa4b5850c154
    pip install trl==1.16.0 timm==1.0.29 tiktoken pillow
    python benchmarks/tune_scripts.py FOLDER --output benchmarks/results/tune_scripts.json     # one GPU
    python benchmarks/tune_scripts.py FOLDER --output FILE --only trl                          # into what is there
    python benchmarks/tune_scripts.py FOLDER --quick                         # small models: tries the program on a CPU

FOLDER has the clones. The third script, trl's `sft.py`, is in its package. The data is made here and needs no network:
the source of Python's standard library as tokens and as text, and images of noise. A script is tuned under `recipe:
bf16_mixed`, with the candidates in `SCRIPTS`. `seconds` is the time of the whole tuning: each run of a candidate
imports, builds the model, proves the policy at the first step and compiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workers import ROOT, device, device_name, rows_in, versions

LIBRARIES = ("torch", "transformers", "torchao", "trl", "timm", "triton", "mpguard")

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: bf16
num_machines: 1
num_processes: 1
use_cpu: {use_cpu}
fp8_config:
  mpguard_recipe: bf16_mixed
"""


@dataclasses.dataclass(frozen=True)
class Script:
    """A script with its data.

    path: in the folder of clones, or in an installed package. make: makes the data in a folder; with `True` for
    `--quick`. arguments: `DATA` stands for that folder. quick: more of them for `--quick`. only: the candidates.
    """

    path: str
    make: Callable[[Path, bool], None]
    arguments: str
    quick: str
    only: Sequence[str]


# -- data -------------------------------------------------------------------------------------------------------------


def source_text() -> bytes:
    """Return 4 MB of the standard library's source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:4_000_000]


def make_tokens(folder: Path, quick: bool) -> None:
    """Bytes as tokens, where nanoGPT looks for a dataset. The sizes of its model stay those of GPT-2."""
    import numpy as np

    del quick
    tokens = np.frombuffer(source_text(), dtype=np.uint8).astype(np.uint16)
    target = folder / "data" / "source"
    target.mkdir(parents=True)
    tokens.tofile(target / "train.bin")
    tokens[:200_000].tofile(target / "val.bin")


def make_llama(folder: Path, quick: bool) -> None:
    """A tokenizer, a Llama of random weights (width 4096, 2 blocks), and texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    text = source_text().decode("utf-8", "ignore")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text[:300_000]], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    width = 128 if quick else 4096
    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=2,
        num_attention_heads=max(1, width // 128), num_key_value_heads=max(1, width // 512),
        max_position_embeddings=8192, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    fast.save_pretrained(folder / "llama")
    (folder / "text").mkdir()
    pieces = (text[at : at + 9000] for at in range(0, 3_000_000, 9000))
    lines = (json.dumps({"text": piece}) + "\n" for piece in pieces)
    (folder / "text" / "train.jsonl").write_text("".join(lines), encoding="utf-8")


def make_images(folder: Path, quick: bool) -> None:
    """Images of noise in four classes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for split, count in (("train", 64 if quick else 512), ("validation", 4)):
        for label in range(4):
            target = folder / "images" / split / f"class{label}"
            target.mkdir(parents=True)
            for number in range(count):
                noise = random.integers(0, 255, (64, 64, 3), dtype=np.uint8)
                Image.fromarray(noise).save(target / f"{number}.jpg")


FP8 = "torchao-tensorwise+compile"

SCRIPTS = {
    "nanoGPT": Script(
        "nanoGPT/train.py",
        make_tokens,
        "--dataset=source --gradient_accumulation_steps=2 --max_iters=200 --eval_iters=1 --out_dir={out}",
        "--device=cpu --n_layer=2 --n_embd=64 --n_head=2 --block_size=64 --batch_size=4",
        ("bf16+compile", FP8, "bf16+compile+graphs"),
    ),
    "trl": Script(
        "trl/scripts/sft.py",
        make_llama,
        "--model_name_or_path DATA/llama --dtype float32 --dataset_name DATA/text --dataset_text_field text "
        "--output_dir {out} --max_steps 200 --per_device_train_batch_size 2 --max_length 2048 --packing --bf16 true "
        "--report_to none --logging_steps 50 --save_strategy no --gradient_checkpointing false",
        "--per_device_train_batch_size 1 --max_length 64",
        ("bf16+compile", f"{FP8}+head+fast_accum", f"{FP8}+fast_accum"),
    ),
    "timm": Script(
        "pytorch-image-models/train.py",
        make_images,
        "--data-dir DATA/images --num-classes 4 --model vit_large_patch16_224 --batch-size 64 --amp "
        "--amp-dtype bfloat16 --epochs 4 --workers 8 --log-interval 50 --output {out}",
        "--model vit_tiny_patch16_224 --batch-size 4 --workers 1 --device cpu",
        ("bf16+compile", FP8, "bf16+compile+graphs", "bf16"),
    ),
}


# -- tuning -----------------------------------------------------------------------------------------------------------


def tune(name: str, clones: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one script, and return its row."""
    script = SCRIPTS[name]
    with tempfile.TemporaryDirectory(prefix="tune-") as temporary:
        folder = Path(temporary)
        path = located(script.path, clones)
        if name == "nanoGPT":  # it reads its data and its configurator from the current folder
            path = Path(shutil.copytree(path.parent, folder, dirs_exist_ok=True)) / path.name
        script.make(folder, options.quick)
        config = folder / "mp.yaml"
        config.write_text(CONFIG.format(use_cpu=str(device() == "cpu").lower()))
        words = f"{script.arguments} {script.quick if options.quick else ''}".replace("DATA", str(folder)).split()
        only = [word for candidate in script.only for word in ("--only", candidate)]
        few = ("--steps", "4", "--warmup", "3") if options.quick else ("--steps", "20", "--warmup", "6")
        search = ("--rounds", str(options.rounds), "--time-limit", "300", "--scratch", str(options.logs / name))
        path_of_modules = os.pathsep.join((str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")))
        began = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "mpguard", "tune", "--config", str(config), "--format", "json", *few, *search, *only,
             str(path), *words],
            cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path_of_modules},
        )  # fmt: skip
        try:
            output, _ = run.communicate()
        except KeyboardInterrupt:
            output, _ = run.communicate()  # tune was interrupted too, and prints what was measured by then
        seconds = time.monotonic() - began
        written = config.read_text().partition("fp8_config:\n")[2].splitlines()
    found = json.loads(output) if output else {"candidates": [], "winner": None}
    return {
        "script": name, "arguments": script.arguments, "status": run.returncode, "seconds": round(seconds),
        "device": device_name(), "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": versions(LIBRARIES), "winner": found["winner"], "candidates": found["candidates"],
        "mp.yaml": written,
    }  # fmt: skip


def located(path: str, clones: Path) -> Path:
    """Return the path of a script: in the folder of clones, else in an installed package."""
    if (clones / path).exists():
        return (clones / path).resolve()
    spec = importlib.util.find_spec(path.split("/", maxsplit=1)[0])
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{clones / path}: no such file, and no package of that name")
    return Path(spec.submodule_search_locations[0]).parent / path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="a folder with clones of the repositories")
    parser.add_argument("--output", type=Path, help="the JSON file for the result")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="these scripts")
    parser.add_argument("--rounds", type=int, default=2, help="runs of a candidate that may win, at most")
    parser.add_argument("--logs", type=Path, help="a folder for the logs and outputs of all runs")
    parser.add_argument("--quick", action="store_true", help="small models: tries the program, measures nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tune-logs-") as temporary:
        options.logs = options.logs or Path(temporary)
        rows = []
        for name in options.only:
            rows.append(tune(name, options.clones, options))
            print(json.dumps(rows[-1], indent=1), flush=True)
            if options.output:
                kept = [row for row in rows_in(options.output) if row["script"] != name]
                options.output.write_text(json.dumps({"rows": [*kept, rows[-1]]}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["winner"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
