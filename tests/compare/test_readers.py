"""Logs of all formats: files that the real tools wrote, damaged ones, and ones that are being written."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from log_files import event_file, losses, wandb_file, write_csv, write_jsonl

from mpguard.compare import RunLog
from mpguard.compare.readers import read_run
from mpguard.core.errors import ConfigError

LOGS = Path(__file__).with_name("logs")
EVENTS = "events.out.tfevents.1000.host"

STEPS = [
    {"event": "step", "step": step, "loss": 2.0 / step, "grad_norm": 1.0, "loss_scale": 1024.0, "ms": 12.5}
    for step in range(1, 21)
]
OVERFLOW = {"event": "overflow", "step": 7, "rank": 1, "module": "layers.3", "value": "inf", "suggestion": "keep it"}


def values(log: RunLog) -> list[float]:
    return list(log.loss.values())


# -- written by the real tools ----------------------------------------------------------------------------------------


def test_tensorboard_wrote_this_file() -> None:
    log = read_run(LOGS / EVENTS)
    assert log.source == "tensorboard" and list(log.loss) == list(range(1, 22)) and log.notes == ()
    assert values(log)[:20] == pytest.approx([2.0 / step for step in range(1, 21)]) and math.isnan(log.loss[21])
    assert log.grad_norm[20] == 19 and set(log.ms.values()) == {250.0}
    for tag, value in (("tensor/float", 0.25), ("tensor/double", 0.125)):
        assert read_run(LOGS / EVENTS, loss=tag).loss == {21: value}
    with pytest.raises(ConfigError, match="no column `tensor/vector`"):
        read_run(LOGS / EVENTS, loss="tensor/vector")


def test_wandb_wrote_this_file() -> None:
    log = read_run(LOGS / "offline.wandb")
    assert log.source == "wandb" and list(log.loss) == list(range(40)) and log.notes == ()
    assert log.loss[3] == 0.5 and math.isnan(log.loss[20]) and log.loss[21] == -math.inf
    assert log.grad_norm[39] == 40 and log.loss_scale[0] == 65536 and len(log.ms) == 39
    assert set(read_run(LOGS / "offline.wandb", loss="deep.a").loss.values()) == {0.5}


def test_installed_tensorboard_reads_the_same(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    path = event_file(tmp_path / EVENTS, [(step, {"loss": 1.0 / step}) for step in range(1, 50)])
    theirs = {
        event.step: event.summary.value[0] for event in loader.EventFileLoader(str(path)).Load() if event.summary.value
    }
    assert len(theirs) == 49 and list(theirs) == list(read_run(path).loss)


def test_the_trainer_hides_nan(tmp_path: Path) -> None:
    """A real Trainer whose loss becomes NaN at step 11: its log has only finite losses."""
    torch = pytest.importorskip("torch", reason="the real library runs here")
    transformers = pytest.importorskip("transformers", reason="the real library runs here")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = torch.nn.Parameter(torch.ones(1)), 0

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1
            return {"loss": (self.weight * x).mean() * (math.nan if self.calls > 10 else 1.0)}

    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=30, logging_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True,
        save_steps=30, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(1)}] * 64)
    trainer.train()
    log = read_run(tmp_path)
    assert log.path == tmp_path / "checkpoint-30" / "trainer_state.json" and log.name == tmp_path.name
    assert all(map(math.isfinite, values(log))), "the Trainer hides it"
    assert any("logging_nan_inf_filter" in note for note in log.notes)
    assert any("gradient norm is not finite at 10 records, first at step 12" in note for note in log.notes)
    from mpguard.compare.divergence import not_finite

    assert "gradient norm is not finite since step 10" in str(not_finite(log))
    without_norm = RunLog("run", log.path, log.source, log.loss)
    assert "loss exactly 0 from step 12 to the end" in str(not_finite(without_norm))


# -- watch's file, and other JSON lines -------------------------------------------------------------------------------


def test_watch(tmp_path: Path) -> None:
    log = read_run(write_jsonl(tmp_path / "run.jsonl", [*STEPS[:7], OVERFLOW, *STEPS[7:]]))
    assert (log.name, log.source, len(log.loss)) == ("run", "watch", 20)
    assert log.grad_norm[1] == 1 and log.loss_scale[1] == 1024 and log.ms[20] == 12.5 and log.notes == ()
    (event,) = log.events
    assert (event.kind, event.step, event.text) == ("overflow", 7, "layers.3: inf: rank 1: keep it")


def test_the_head_and_statistics_of_watch_are_no_events(tmp_path: Path) -> None:
    value = {"phase": "forward", "kind": "nan", "inputs": [{"min": 0.0}], "loss": "NaN", "reason": None}
    rows = [
        {"event": "run", "version": 1, "level": "light", "rank": 0},
        *STEPS,
        {"event": "underflow_shares", "step": 10, "rank": 0, "module": None, "value": {"0": {"fp16": 0.5}}},
        {"event": "nonfinite", "step": 20, "rank": 0, "module": "0.0", "value": value, "suggestion": "check it"},
    ]
    log = read_run(write_jsonl(tmp_path / "run.jsonl", rows))
    (event,) = log.events
    assert (event.kind, event.text) == ("nonfinite", "0.0: phase forward, kind nan, loss NaN: check it")


def test_times_of_emulated_fp8_are_left_out(tmp_path: Path) -> None:
    """The watch writes the head so: tests/watching/test_output.py."""
    log = read_run(write_jsonl(tmp_path / "run.jsonl", [{"event": "run", "version": 1, "emulated": True}, *STEPS]))
    assert log.ms == {} and len(log.loss) == 20
    assert log.notes == ("its FP8 was computed in software: the time of its steps is left out",)


@pytest.mark.parametrize("value", [math.nan, "nan", "NaN", "-Infinity", math.inf])
def test_what_json_has_no_number_for(tmp_path: Path, value: object) -> None:
    log = read_run(write_jsonl(tmp_path / "run.jsonl", [*STEPS, {"event": "step", "step": 21, "loss": value}]))
    assert not math.isfinite(log.loss[21])


def test_a_value_that_was_not_observed_is_none(tmp_path: Path) -> None:
    log = read_run(write_jsonl(tmp_path / "run.jsonl", [*STEPS, {"event": "step", "step": 21, "loss": None}]))
    assert 21 not in log.loss


def test_a_cut_off_last_line_is_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "run.jsonl", STEPS)
    path.write_bytes(path.read_bytes()[:-20])
    log = read_run(path)
    assert len(log.loss) == 19 and any("cut off" in note for note in log.notes)


def test_lines_of_other_ranks_and_without_a_step_are_left_out(tmp_path: Path) -> None:
    rows = [{**row, "rank": rank, "loss": row["loss"] + rank} for row in STEPS for rank in (0, 1)]
    log = read_run(write_jsonl(tmp_path / "run.jsonl", [{"args": 1}, *rows]))
    assert log.loss[1] == 2.0 and len(log.notes) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "loss": 1}\nEpoch 1 done\n{"step": 2, "loss": 1}\n', r"run.jsonl:2: is not JSON: `Epoch 1 done`"),
        ('[1, 2]\n{"step": 2, "loss": 1}\n', r"run.jsonl:1: is not a JSON object"),
        ('{"event": "start", "version": 2}\n', r"is a watch file of version 2; this mpguard reads version 1"),
        ("", "no column is known as the loss"),
        ('{"step": 1, "train_a_loss": 1, "train_b_loss": 2}\n', "several columns may be the loss; name one with `--lo"),
        ('{"step": 1, "eval_loss": 1}\n', "no column is known as the loss.*`eval_loss`"),
    ],
)
def test_lines_that_are_not_a_log(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path / "run.jsonl")


def test_two_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    both = [{**row, "loss": row["loss"] * factor} for row in STEPS for factor in (1, 1.1)]
    with pytest.raises(ConfigError, match="several values for one step"):
        read_run(write_jsonl(tmp_path / "run.jsonl", both))
    zigzag = [{"step": step + offset, "loss": float(step)} for step in range(60) for offset in (1000, 0)]
    with pytest.raises(ConfigError, match="several values for one step"):
        read_run(write_jsonl(tmp_path / "run.jsonl", zigzag))


def test_a_restart_from_a_checkpoint_replaces_what_it_does_again(tmp_path: Path) -> None:
    again = [{**row, "loss": 9.0} for row in STEPS[9:12]]
    log = read_run(write_jsonl(tmp_path / "run.jsonl", [*STEPS[:15], *again]))
    assert list(log.loss) == list(range(1, 13)) and log.loss[10] == 9.0
    assert any("restarted at step 10" in note for note in log.notes)


# -- TensorBoard ------------------------------------------------------------------------------------------------------

ROWS = [(step, {"train/loss": 2.0, "eval/loss": 1.0}) for step in range(1, 30)]


@pytest.mark.parametrize("cut", [1, 5, 13, 40])
def test_an_event_file_that_is_being_written(tmp_path: Path, cut: int) -> None:
    path = event_file(tmp_path / EVENTS, ROWS)
    path.write_bytes(path.read_bytes()[:-cut])
    log = read_run(path)
    assert len(log.loss) == 28 and any("cut off" in note for note in log.notes)


def test_zeros_at_the_end_are_not_written_yet(tmp_path: Path) -> None:
    path = event_file(tmp_path / EVENTS, ROWS)
    path.write_bytes(path.read_bytes() + bytes(100))
    assert len(read_run(path).loss) == 29


@pytest.mark.parametrize("offset", [40, 2, 200], ids=["length", "first", "data"])
def test_a_damaged_event_file_is_refused_with_the_place(tmp_path: Path, offset: int) -> None:
    path = event_file(tmp_path / EVENTS, ROWS)
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"the record at byte \d+ is damaged"):
        read_run(path)


def test_a_record_that_is_no_event_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not an event"):
        read_run(event_file(tmp_path / EVENTS, ROWS, extra=b"\xff\xff\xff"))


def test_event_files_of_one_folder_are_one_run(tmp_path: Path) -> None:
    event_file(tmp_path / EVENTS, [(step, {"loss": 1.0}) for step in range(1, 20)])
    event_file(tmp_path / EVENTS.replace("1000", "2000"), [(step, {"loss": 3.0}) for step in range(11, 31)])
    log = read_run(tmp_path)
    assert len(log.loss) == 30 and log.loss[10] == 1.0 and log.loss[11] == 3.0 and log.name == tmp_path.name


# -- W&B --------------------------------------------------------------------------------------------------------------


def test_records_that_reach_over_blocks(tmp_path: Path) -> None:
    rows = [(step, {"loss": 1.0 / step, "text": "x" * 3000}) for step in range(1, 60)]
    rows[30][1]["text"] = "x" * 70_000
    log = read_run(wandb_file(tmp_path / "run-1.wandb", rows))
    assert list(log.loss) == list(range(1, 60)) and log.loss[31] == 1 / 31 and log.notes == ()


def test_a_wandb_file_that_is_being_written_or_damaged(tmp_path: Path) -> None:
    data = wandb_file(tmp_path / "run.wandb", [(step, {"loss": 1.0}) for step in range(1, 60)]).read_bytes()
    for cut in (1, 5, 30):
        (tmp_path / "run.wandb").write_bytes(data[:-cut])
        log = read_run(tmp_path / "run.wandb")
        assert len(log.loss) == 58 and any("cut off" in note for note in log.notes)
    for offset, message in ((200, r"at byte \d+ is damaged"), (6, "version 1"), (0, "is not a W&B offline file")):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        (tmp_path / "run.wandb").write_bytes(damaged)
        with pytest.raises(ConfigError, match=message):
            read_run(tmp_path / "run.wandb")


# -- CSV and trainer_state.json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "step,loss\n1,2.0\n2,1.0\n",
        "Wall time,Step,Value\n1.0,1,2.0\n1.5,2,1.0\n",  # TensorBoard's download
        '"Step","run - train/loss","run - train/loss__MIN"\n"1","2.0","2.0"\n"2","1.0","1.0"\n',  # W&B's export
        "step;loss;note\n1;2.0;text\n;;\n2;1.0;\n",
        "\ufeffstep\tloss\r\n1\t2.0\r\n2\t1.0\r\n",
    ],
)
def test_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.csv").write_bytes(text.encode())
    assert read_run(tmp_path / "run.csv").loss == {1: 2.0, 2: 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("epoch,loss\n1,2\n", "has no column of steps.*epoch, loss"),
        ("step,loss\n1,2,3\n", "run.csv:2: has 3 cells, the header 2"),
        ("step,loss\none,2\n", "run.csv:2: `step` is `one`, and not a number"),
        ("step,loss\n1,\n", "no column is known as the loss"),
    ],
)
def test_tables_that_are_not_a_log(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path / "run.csv")


def test_a_row_that_is_being_written(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("step,loss\n1,2.0\n2,1.")
    log = read_run(tmp_path / "run.csv")
    assert log.loss == {1: 2.0} and any("cut off" in note for note in log.notes)


def test_trainer_state(tmp_path: Path) -> None:
    history = [{"step": 10 * i, "loss": 2.0 / i, "grad_norm": 1.0, "epoch": 0.1} for i in range(1, 9)]
    history += [{"step": 80, "eval_loss": 1.0}, {"step": 80, "train_loss": 1.2, "train_runtime": 3.0}]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"log_history": history}))
    log = read_run(path)
    assert list(log.loss) == list(range(10, 90, 10)) and log.loss[80] == 0.25 and len(log.notes) == 1
    for text, message in (
        ("{", "is it being written"),
        ("{}", "no `log_history`"),
        ('{"log_history": [1]}', "a record"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"(?i){message}"):
            read_run(path)


# -- where the log is -------------------------------------------------------------------------------------------------


def test_the_log_in_a_folder(tmp_path: Path) -> None:
    write_csv(tmp_path / "one" / "loss.csv", losses(20))
    assert read_run(tmp_path / "one").path.name == "loss.csv"
    write_jsonl(tmp_path / "one" / "run.jsonl", STEPS)
    with pytest.raises(ConfigError, match=r"has several logs; name the file to compare: run\.jsonl, loss\.csv"):
        read_run(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no log"):
        read_run(tmp_path / "empty")


def test_the_newest_checkpoint_has_the_state(tmp_path: Path) -> None:
    for step in (900, 1000, 200):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": each, "loss": 1.0} for each in range(100, step + 1, 100)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert list(read_run(tmp_path).loss)[-1] == 1000


def test_a_file_is_recognized_by_its_content(tmp_path: Path) -> None:
    for name, original in (("events", LOGS / EVENTS), ("run", LOGS / "offline.wandb")):
        shutil.copy(original, tmp_path / name)
        assert len(read_run(tmp_path / name).loss) > 20
    write_jsonl(tmp_path / "log.txt", STEPS)
    assert len(read_run(tmp_path / "log.txt").loss) == 20
    (tmp_path / "model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ConfigError, match="is no log that is known"):
        read_run(tmp_path / "model.bin")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean `.*log.txt`\?"):
        read_run(tmp_path / "logs.txt")
