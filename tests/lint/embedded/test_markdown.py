"""Blocks of Python in Markdown, behind `--include-markdown`: places in the file, fixes in the block."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpguard.cli import main
from mpguard.lint.embedded.markdown import blocks

OLD = "from torch.cuda.amp import GradScaler\n\nscaler = GradScaler()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fenced(code: str, language: str = "python", fence: str = "```", indent: str = "") -> str:
    return "".join(f"{indent}{line}\n" for line in [f"{fence}{language}", *code.splitlines(), fence])


def programs(text: str) -> list[str]:
    return [block.program for block in blocks(text)]


def lint(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    main(["lint", "--format", "json", *arguments])
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return findings


# -- which blocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        fenced("x = 1"),
        fenced("x = 1", "py"),
        fenced("x = 1", "Python3"),
        fenced("x = 1", "{.python .numberLines}"),
        fenced("x = 1", "python title=a.py"),
        fenced("x = 1", " python"),
        fenced("x = 1", fence="~~~"),
        fenced("x = 1", fence="````"),
        "- item\n\n" + fenced("x = 1", indent="  "),
        "- " + fenced("x = 1", indent="  ").lstrip(),
        '=== "Tab"\n\n' + fenced("x = 1", indent="    "),
        "<details>\n" + fenced("x = 1") + "</details>\n",
        fenced("x = 1", indent="> "),
        "Inline ``` is `` no fence ```python\n" + fenced("x = 1"),
        fenced("x = (", "text") + fenced("x = 1"),
        fenced("```python\ny = 2\n", "markdown", fence="````") + fenced("x = 1"),
        fenced("x = 1").replace("\n", "\r\n"),
    ],
)
def test_blocks_of_python(text: str) -> None:
    assert [program.replace("\r", "") for program in programs(text)] == ["x = 1\n"]


@pytest.mark.parametrize(
    "text",
    [
        fenced("x = 1", "pycon"), fenced("x = 1", "python-repl"), fenced("x = 1", "bash"), fenced("x = 1", ""),
        fenced("x = (\n...", "python"), fenced(">>> x = 1"), "```python\nx = 1\n", "", fenced("", "python"),
        "    x = 1\n", "```python x = 1```\n",
    ],
)  # fmt: skip
def test_what_is_no_block_of_python(text: str) -> None:
    assert programs(text) == []


def test_every_block_is_a_program_of_its_own() -> None:
    text = fenced("x = 1") + "text\n" + fenced("if x:\n    y = 2\n") + fenced("x = (")
    assert programs(text) == ["x = 1\n", "if x:\n    y = 2\n"]


def test_other_line_separators_of_unicode_end_no_line() -> None:
    assert programs("```python\nx = '\f\v\x85\u2028'\n```\n") == ["x = '\f\v\x85\u2028'\n"]


def test_the_markdown_parser_is_not_imported_without_a_block_of_python() -> None:
    code = (
        "import sys\nfrom mpguard.lint.embedded.markdown import blocks\n"
        "assert not blocks('# a\\n```bash\\nls\\n```\\n')\nassert 'markdown_it' not in sys.modules\n"
        "assert blocks('```python\\nx\\n```\\n')\nassert 'markdown_it' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- findings and fixes -------------------------------------------------------------------------------


def test_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("README.md").write_text(fenced(OLD))
    Path("docs.md").write_text(fenced(OLD))
    Path("a.py").write_text("x = 1\n")
    assert lint(capsys, "--select", "MPG302") == []
    found = lint(capsys, "--select", "MPG302", "--include-markdown")
    assert [each["path"] for each in found] == ["README.md", "docs.md"]


def test_places_are_those_of_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.md").write_text("# Title é\n\n1. first\n\n" + fenced(OLD, indent="   ") + "\n" + fenced(OLD))
    found = lint(capsys, "--select", "MPG302", "--include-markdown", "a.md")
    assert [(each["line"], each["column"]) for each in found] == [(6, 4), (12, 1)]
    assert "cell" not in found[0]
    assert main(["lint", "--select", "MPG302", "--include-markdown", "a.md"]) == 1
    assert "6 |    from torch.cuda.amp import GradScaler\n" in capsys.readouterr().out


def test_new_lines_of_a_fix_get_the_prefix_of_the_block() -> None:
    (block,) = blocks("> - " + fenced("x = 1\ny = 2", indent=">   ").removeprefix(">   "))
    assert (block.program, block.prefix) == ("x = 1\ny = 2\n", ">   ")
    assert block.text[block.end :] == "```\n"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_fixes_stay_in_the_block(ending: str) -> None:
    text = "# Title\n\n- item\n\n" + fenced(OLD, indent="  ") + "after\n" + fenced("x = (\n") + fenced(OLD)
    Path("a.md").write_bytes(text.replace("\n", ending).encode())
    assert main(["lint", "--select", "MPG302", "--fix", "--include-markdown", "a.md"]) == 0
    after = Path("a.md").read_bytes().decode()
    expected = text.replace("torch.cuda.amp", "torch.amp").replace("GradScaler()", 'GradScaler("cuda")')
    assert after == expected.replace("\n", ending)


def test_bytes_that_are_not_utf8_stay() -> None:
    Path("a.md").write_bytes(b"\xef\xbb\xbf\xff\xfe\n" + fenced(OLD).encode())
    assert main(["lint", "--select", "MPG302", "--fix", "--include-markdown", "a.md"]) == 0
    after = Path("a.md").read_bytes()
    assert after.startswith(b"\xef\xbb\xbf\xff\xfe\n```python\nfrom torch.amp import")


def test_suppressions_in_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.md").write_text(fenced(OLD.replace("GradScaler\n", "GradScaler  # noqa: MPG302\n", 1)))
    assert lint(capsys, "--select", "MPG302", "--include-markdown", "a.md") == []


def test_a_fragment_has_no_findings_even_if_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.md").write_text(fenced("from torch.cuda.amp import (\n") + fenced("x = 1\n"))
    assert lint(capsys, "--include-markdown", "a.md") == []
    assert main(["lint", "--include-markdown", "a.md"]) == 0


def test_launch_lines_are_read_too(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mp.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\n")
    text = fenced(OLD) + fenced("accelerate launch train.py --config mp.yaml", "bash")
    Path("README.md").write_text(text)
    found = lint(capsys, "--select", "MPG302,MPG866", "--include-markdown")
    assert [(each["code"], each["line"]) for each in found] == [("MPG302", 2), ("MPG866", 7)]
    assert main(["lint", "--select", "MPG302,MPG866", "--include-markdown", "--fix"]) == 0
    assert "accelerate launch --config_file mp.yaml train.py\n" in Path("README.md").read_text()
