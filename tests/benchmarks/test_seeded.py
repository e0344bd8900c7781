"""benchmarks/seeded.py: kinds make their mistake in programs that are right, and leave others alone."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest
from paths import REPOSITORY

from mpguard.lint.model.rule import rules

_spec = importlib.util.spec_from_file_location("seeded", REPOSITORY / "benchmarks" / "seeded.py")
assert _spec is not None and _spec.loader is not None
seeded = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seeded)
KINDS = {each.name: each for each in seeded.KINDS}

SCALED = textwrap.dedent("""
    import torch
    from torch.nn.utils import clip_grad_norm_

    def train(model, data, epochs):
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda")
        for x, y in data:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
""")
PLAIN = textwrap.dedent("""
    import torch

    def train(model, data):
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in data:
            x = x.to("cuda")
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(torch.nn.Linear(8, 8), [(torch.ones(2, 8), torch.ones(2, 8))])
""")
DEEPSPEED = '{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 0}, "zero_optimization": {"stage": 2}}'
ACCELERATE = textwrap.dedent("""\
    compute_environment: LOCAL_MACHINE
    distributed_type: FSDP
    mixed_precision: bf16
    fsdp_config:
      fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
    num_processes: 2
""")
SEEN = {
    "train.py": (SCALED, "scaler-removed scaler-scales-nothing scale-dropped scaled-loss-discarded step-bypasses-scaler"
        " update-dropped unscale-dropped clip-before-unscale unscale-twice autocast-fp16-to-bf16 scaler-made-in-loop"),
    "plain.py": (PLAIN, "model-half model-to-float16 batch-half model-to-bfloat16 default-dtype-half"
        " adam-eps-for-half-weights float8-without-compile"),
    "ds.json": (DEEPSPEED, "deepspeed-fp16-and-bf16 deepspeed-loss-scale-under-bf16 deepspeed-misspelt-section"
        " deepspeed-static-loss-scale deepspeed-two-dtypes deepspeed-amp-section"),
    "accelerate.yaml": (ACCELERATE, "accelerate-unquoted-no accelerate-unknown-key accelerate-unknown-fsdp-key"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_the_mistakes_are_made_and_seen_in_a_program_in_which_nothing_is_found(name: str, tmp_path: Path) -> None:
    text, kinds = SEEN[name]
    path = tmp_path / name
    path.write_text(text)
    assert seeded.reported(path, text) == []
    for each in kinds.split():
        kind = KINDS[each]
        assert kind.fits(text), each
        mutant = kind.mutate(text)
        assert mutant not in (None, text), each
        assert set(seeded.reported(path, mutant)) & set(kind.rules), (each, mutant)


def test_a_program_without_the_place_is_left_alone() -> None:
    assert not KINDS["scaler-removed"].fits(PLAIN)
    assert KINDS["update-dropped"].mutate(PLAIN) is None
    assert KINDS["scale-dropped"].mutate(PLAIN) is None


def test_what_only_a_comment_contains_is_not_in_a_program() -> None:
    assert KINDS["update-dropped"].fits(SCALED)
    assert not KINDS["update-dropped"].fits(SCALED.replace("scaler = torch", "# scaler = torch"))


def test_words_are_looked_for_in_the_modules_that_a_program_imports(tmp_path: Path) -> None:
    folder = tmp_path / "o+r" / "scripts"
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "net.py").write_text("import torch\n\nwith torch.autocast('cuda'):\n    pass\n")
    (folder / "other.py").write_text("AMP = 1\n")
    program = seeded.Program("o/r", folder / "train.py", "import other\nfrom parts.net import Net\n")
    assert seeded.imports(tmp_path, program, r"autocast\(")
    assert seeded.imports(tmp_path, program._replace(text="from parts import net\n"), r"autocast\(")
    assert not seeded.imports(tmp_path, program._replace(text="import other\n"), r"autocast\(")


def test_a_trial_on_random_tensors_trains_nothing(tmp_path: Path) -> None:
    trial = "import torch\n\ndef run(model):\n    x = torch.rand(2, 4)\n    model(x).sum().backward()\n\nrun(Net())\n"
    real = trial.replace("(model)", "(model, loader)").replace("torch.rand(2, 4)", "next(loader)")
    users = seeded.Users(tmp_path)
    for lines, counts in ((trial, False), (real, True)):
        text = lines + 'if __name__ == "__main__":\n    pass\n'
        program = seeded.Program("o/r", tmp_path / "o+r" / "train.py", text)
        assert users.run(program, text.replace("    model(x)", "    model.half()\n    model(x)")) is counts


def test_a_copy_of_a_file_does_not_use_its_functions(tmp_path: Path) -> None:
    text = "import torch\n\ndef fit(model, x):\n    model(x).sum().backward()\n"
    folder = tmp_path / "o+r"
    folder.mkdir()
    for name, user in (("copy.py", text), ("app.py", "import train, copy\n")):
        (folder / name).write_text(user)
    program = seeded.Program("o/r", folder / "train.py", text)
    mutant = text.replace("    model(x)", "    model.half()\n    model(x)")
    assert not seeded.Users(tmp_path).run(program, mutant)
    (folder / "app.py").write_text("from train import fit\n\nfit(net, x)\n")
    assert seeded.Users(tmp_path).run(program, mutant)


def test_a_dtype_of_torch_needs_the_name_torch() -> None:
    assert KINDS["model-to-float16"].fits(PLAIN)
    assert not KINDS["model-to-float16"].fits(PLAIN.replace("import torch", "import torch as th"))


def test_kinds_have_names_of_their_own_and_rules_that_there_are() -> None:
    assert len(KINDS) == len(seeded.KINDS)
    assert {code for each in seeded.KINDS for code in each.rules} <= set(rules(own_only=True))


def test_mutants_are_counted_by_the_rules_of_their_kind() -> None:
    outcomes = [
        seeded.Outcome("update-dropped", "a/a", "x.py", ["MPG204"]),
        seeded.Outcome("update-dropped", "b/b", "y.py", ["MPG201"]),
    ]
    assert seeded.summary(outcomes) == {"update-dropped": {"rules": ["MPG204"], "mutants": 2, "found": 1}}
