"""Edits of text, and files that are replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpguard.core.text_edits import Edit, OverlappingEdits, apply_edits, compatible, write_atomically


def test_edits_are_applied_in_any_order() -> None:
    edits = [Edit(8, 11, "C"), Edit(0, 3, "A"), Edit(4, 4, "-")]
    assert apply_edits("one two and", edits) == "A -two C"


def test_insertions_at_one_place_keep_their_order() -> None:
    assert apply_edits("x", [Edit(0, 0, "a"), Edit(0, 0, "b")]) == "abx"


def test_the_same_edit_twice_counts_once() -> None:
    assert apply_edits("x", [Edit(0, 0, "import a\n"), Edit(0, 0, "import a\n")]) == "import a\nx"


@pytest.mark.parametrize("other", [Edit(2, 5, "y"), Edit(0, 4, "y"), Edit(1, 3, "y"), Edit(2, 2, "y")])
def test_overlapping_edits_are_refused(other: Edit) -> None:
    assert not compatible([Edit(1, 4, "x")], [other])
    with pytest.raises(OverlappingEdits):
        apply_edits("abcdef", [Edit(1, 4, "x"), other])


def test_neighbouring_edits_are_compatible() -> None:
    assert compatible([Edit(1, 4, "x")], [Edit(4, 5, "y"), Edit(0, 1, "z"), Edit(4, 4, "w")])


def test_different_insertions_at_one_place_are_not_compatible() -> None:
    assert not compatible([Edit(4, 4, "  key: 1\n")], [Edit(4, 4, "section:\n")])
    assert compatible([Edit(4, 4, "import a\n")], [Edit(4, 4, "import a\n"), Edit(5, 5, "b")])


@given(st.text(max_size=60), st.data())
def test_text_outside_the_edits_stays(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=4, max_size=4, unique=True)
                            if len(text) >= 3 else st.just([0, 0, len(text), len(text)])))  # fmt: skip
    a, b, c, d = cuts
    result = apply_edits(text, [Edit(a, b, "<1>"), Edit(c, d, "<2>")])
    assert result == text[:a] + "<1>" + text[b:c] + "<2>" + text[d:]


def test_a_written_file_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "mp.yaml"
    file.write_bytes(b"old")
    file.chmod(0o640)
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["mp.yaml"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give a file away")
def test_a_new_owner_takes_no_bits_away(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(b"old")
    os.chown(file, 1234, 2345)
    file.chmod(0o6755)
    write_atomically(file, b"new")
    status = file.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o6755, 1234, 2345)


def test_setuid_bits_of_another_owner_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose owner cannot be restored loses its setuid bit; its group is restored where that is permitted."""
    calls = []

    def refuse(path: Path, owner: int, group: int) -> None:
        calls.append((owner, group))
        raise PermissionError

    file = tmp_path / "train.py"
    file.write_bytes(b"old")
    file.chmod(0o6751)
    monkeypatch.setattr(os, "chown", refuse)
    write_atomically(file, b"new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o751
    assert calls == [(file.stat().st_uid, file.stat().st_gid), (-1, file.stat().st_gid)]


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="there are no extended attributes here")
def test_extended_attributes_stay(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(b"old")
    try:
        os.setxattr(file, "user.note", b"mine")
    except OSError:
        pytest.skip("not on this file system")
    write_atomically(file, b"new")
    assert os.getxattr(file, "user.note") == b"mine"


def test_a_new_file_gets_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mp.yaml"
    file.write_bytes(b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["mp.yaml"]
