"""Checks of a launch that need no torch: the programs that DeepSpeed starts other nodes with."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpguard.core.errors import ConfigError
from mpguard.document import read
from mpguard.runtime.launch.preflight import check_remote_shell


@pytest.mark.parametrize(
    ("named", "flag", "installed", "missing"),
    [
        (None, None, (), "`deepspeed_multinode_launcher: pdsh`, which needs `ssh` and `pdsh`, not installed here"),
        (None, None, ("ssh",), "which needs `pdsh`, not"),
        (None, None, ("ssh", "pdsh"), ""),
        ("openmpi", None, (), "`deepspeed_multinode_launcher: openmpi`, which needs `ssh`, not installed here"),
        ("openmpi", "standard", (), ""),
        ("standard", None, (), ""),
        ("nossh", None, (), ""),
    ],
)
def test_deepspeeds_launcher_for_several_nodes_needs_ssh(
    named: str | None, flag: str | None, installed: tuple[str, ...], missing: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for each in installed:
        (tmp_path / each).write_text("#!/bin/sh\n")
        (tmp_path / each).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    line = f"\n  deepspeed_multinode_launcher: {named}" if named else ""
    file = tmp_path / "mp.yaml"
    file.write_text(f"distributed_type: DEEPSPEED\nnum_machines: 2\ndeepspeed_config:\n  zero_stage: 2{line}\n")
    document = read(file)
    check_remote_shell(document, "DEEPSPEED", 1, flag)
    check_remote_shell(document, "FSDP", 2, flag)
    if not missing:
        check_remote_shell(document, "DEEPSPEED", 2, flag)
        return
    with pytest.raises(ConfigError) as raised:
        check_remote_shell(document, "DEEPSPEED", 2, flag)
    assert missing in str(raised.value) and "\n" not in str(raised.value)
