"""Two nodes of one job on this machine, each with a launcher of its own; `make test-nodes` runs more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the real library runs here")

from nodes import nodes, script


def test_two_nodes_are_proven_together(tmp_path: Path) -> None:
    train = script(tmp_path)
    with nodes(tmp_path, backend="c10d") as job:
        both = [job.launch(number, "--config", job.config(number), train) for number in (0, 1)]
        assert [node.wait() for node in both] == [0, 0], both[0].output + both[1].output
        shown = both[0].output + both[1].output
        assert shown.count("step 1 proven in force on all 2 ranks") == 1, shown
        assert "rank 0 of 2 finished" in shown and "rank 1 of 2 finished" in shown


def test_two_nodes_with_different_configs_are_refused_before_they_train(tmp_path: Path) -> None:
    train = script(tmp_path)
    with nodes(tmp_path) as job:
        configs = [job.config(0), job.config(1, recipe="fp32", mixed_precision="'no'")]
        both = [job.launch(number, "--config", config, train) for number, config in enumerate(configs)]
        assert [node.wait() for node in both] == [1, 1], both[0].output + both[1].output
        for node in both:
            assert "the ranks have different plans: rank 0 (node 0, " in node.output
            assert "recipe bf16_mixed, bf16 True" in node.output and "recipe fp32, bf16 False" in node.output
            assert "proven in force" not in node.output and "Traceback" not in node.output
        assert both[1].last_line.startswith("mpguard: not in force: the ranks have different plans")
