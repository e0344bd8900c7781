"""Roles: names that have one, and names that look like it."""

from __future__ import annotations

import re

import pytest

from mpguard.lint.facts.program import roles

NAMES = {
    "OPTIMIZER": (("optimizer_g", "self.optim", "FP16Optimizer"), ("options", "opt")),
    "LOSSES": (("loss", "loss_fn", "lossfunc", "criterion"), ("lost", "criteria")),
    "OVERFLOWS": (("isfinite", "found_inf", "is_nan", "overflowed"), ("info", "name", "inference")),
    "CHECKPOINTS": (("ckpt", "model_state_dict", "last_checkpoint", "unet_sd"), ("state", "sdxl", "check")),
    "SAVES": (("save", "torch_save", "save_model", "saveWeights", "saved"), ("saves_time", "autosaver", "load")),
    "STORES": (("save_model", "restore_from", "resume", "dump", "state_dict"), ("train", "forward")),
    "KEEPS_RESULT": (("evaluate", "push_to_hub", "save", "accuracy_score"), ("train", "step", "backward")),
    "GIVES_DATA": (("DataLoader", "get_batches", "next", "read_image"), ("reread", "model", "samples_seen")),
    "MEASURED": (("train_loss", "metric_fn", "kl_div"), ("lost", "model")),
    "PRINTS": (("print", "log_metrics", "add_info", "warn"), ("step", "clip")),
    "ACCUMULATES": (("(i+1)%4", "is_accumulating", "sync_gradients", "should_step"), ("step>0", "use_amp", "last")),
    "HANDLES_STATE": (("save_checkpoint", "log_scale", "isinstance"), ("train_step", "backward")),
}
EVALUATE = ("evaluate", "validation_step", "test_model", "export_onnx", "sampleImages")
TRAIN = ("train", "fit", "train_one_epoch", "pretrainStage")


def test_each_role_has_names() -> None:
    assert NAMES.keys() == {name for name in vars(roles) if name.isupper() and not name.startswith("_")}


@pytest.mark.parametrize("role", NAMES)
def test_a_role_is_told_by_the_name(role: str) -> None:
    of_role, others = NAMES[role]
    pattern = getattr(roles, role)
    search = re.compile(pattern).search if isinstance(pattern, str) else pattern.search
    assert all(search(name) for name in of_role)
    assert not any(search(name) for name in others)


def test_functions_that_train_and_that_evaluate() -> None:
    assert all(map(roles.evaluates, EVALUATE)) and not any(map(roles.evaluates, TRAIN))
    assert all(map(roles.trains, TRAIN)) and not any(map(roles.trains, EVALUATE))
    assert not roles.evaluates("train_and_evaluate"), "what also trains is a training"
    assert not roles.evaluates("contest") and not roles.trains("trainable")
    assert roles.measures("profile_step") and roles.measures("bench") and not roles.measures("validate")
