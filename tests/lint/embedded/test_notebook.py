"""Jupyter notebooks: one program of all cells, findings by cell, fixes within the source of a cell and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpguard.cli import main
from mpguard.core.text_edits import Edit, EditRefused
from mpguard.lint.embedded.notebook import BrokenNotebook, Notebook

LOOP = """\
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - y).pow(2).mean()
    scaler.scale(loss).backward()
    optimizer.step()
    scaler.update()"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def code(source: str, as_list: bool = True, **more: Any) -> dict[str, Any]:
    lines = source.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": 3, "metadata": {"b": 1, "a": 2}, "outputs": [],
            "source": lines if as_list else source, **more}  # fmt: skip


def text_cell(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": [source]}


def notebook(*cells: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


TRAINING = notebook(
    text_cell("# optimizer.step() in a text\n"),
    code("%pip install torch\n!nvidia-smi\nimport torch\nfiles = !ls *.pt"),
    code("%%time\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.AdamW(model.parameters())\n"
         "scaler = torch.amp.GradScaler('cuda')  # é\n", as_list=False),
    code(LOOP, outputs=[{"output_type": "stream", "name": "stdout", "text": ["    optimizer.step()\n"]}]),
)  # fmt: skip


def write(content: Any, name: str = "a.ipynb", **how: Any) -> bytes:
    data = json.dumps(content, **{"indent": 1, "ensure_ascii": False, **how}).encode() + b"\n"
    Path(name).write_bytes(data)
    return data


def lint(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 1) -> list[dict[str, Any]]:
    assert main(["lint", "--format", "json", *arguments]) == status
    findings: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return findings


# -- findings -----------------------------------------------------------------------------------------


def test_findings_have_a_cell_and_lines_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    write(TRAINING)
    (found,) = lint(capsys, "--select", "MPG203", "a.ipynb")
    assert (found["code"], found["path"], found["cell"]) == ("MPG203", "a.ipynb", 4)
    assert (found["line"], found["column"], found["end_line"], found["end_column"]) == (5, 5, 5, 21)
    (edit,) = found["fix"]["edits"]
    assert edit == {"cell": 4, "start": {"line": 5, "column": 5}, "end": {"line": 5, "column": 21},
                    "text": "scaler.step(optimizer)"}  # fmt: skip


def test_a_notebook_is_found_and_reported_by_cell(capsys: pytest.CaptureFixture[str]) -> None:
    write(TRAINING, "n.ipynb")
    assert main(["lint", "--select", "MPG203", "--format", "concise"]) == 1
    assert capsys.readouterr().out.startswith("n.ipynb:cell 4:5:5: MPG203 `optimizer.step()` bypasses")
    assert main(["lint", "--select", "MPG203"]) == 1
    out = capsys.readouterr().out
    assert "n.ipynb:cell 4:5:5 MPG203 error" in out
    assert "5 |     optimizer.step()\n  |     ^^^^^^^^^^^^^^^^" in out


def test_python_files_have_no_cell(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text("import torch\n" + "\n".join(TRAINING["cells"][2]["source"].splitlines()[1:]) + "\n" + LOOP)
    (found,) = lint(capsys, "--select", "MPG203", "a.py")
    assert "cell" not in found and "cell" not in found["fix"]["edits"][0]


def test_a_second_place_in_another_cell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    cells = LOOP.splitlines(keepends=True)
    write(notebook(code("import torch\nscaler = torch.amp.GradScaler('cuda')\nx = 1\n"),
                   code("".join(cells[:4])), code("optimizer.step()\nscaler.update()")))  # fmt: skip
    assert main(["lint", "--select", "MPG203", "a.ipynb"]) == 1
    out = capsys.readouterr().out
    assert "a.ipynb:cell 3:1:1 MPG203" in out
    assert "note: a.ipynb:cell 2:4:5: the loss is scaled here: scaler.scale(loss).backward()" in out


def test_suppressions_in_cells(capsys: pytest.CaptureFixture[str]) -> None:
    write(notebook(*TRAINING["cells"][:3], code(LOOP.replace("step()", "step()  # noqa: MPG203"))))
    assert lint(capsys, "--select", "MPG203", "a.ipynb", status=0) == []


@pytest.mark.parametrize(
    ("content", "line", "column", "message"),
    [
        ('{"cells": [\n  {"cell_type": }', 2, 17, "not JSON"),
        ("[]", 1, 1, "not a notebook"),
        ("[]", 1, 1, "not a notebook"),
        ('{"nbformat": 4}', 1, 1, "`cells`, a list, is needed"),
        ('{"worksheets": []}', 1, 1, "format 3 or older"),
        ('{"cells":\n {}}', 2, 2, "a list is needed here"),
        ('{"cells": [{"cell_type": "code"}]}', 1, 12, "cell 1 has no `source`"),
        ('{"cells": [{"cell_type": "code", "source": [1]}]}', 1, 44, "is neither a string nor a list"),
        (b'{"cells": [\n"\xff"]}', 2, 2, "not UTF-8"),
        ('{"cells": ' + "[" * 200_000, 1, 1, "not JSON"),
    ],
)
def test_broken_notebooks(
    capsys: pytest.CaptureFixture[str], content: str | bytes, line: int, column: int, message: str
) -> None:
    Path("a.ipynb").write_bytes(content.encode() if isinstance(content, str) else content)
    Path("b.py").write_text("x = 1\n")
    (found,) = lint(capsys, "a.ipynb", "b.py")
    assert (found["code"], found["line"], found["column"]) == ("MPG000", line, column)
    assert message in found["message"]
    assert "cell" not in found, "its lines are those of the file"


def test_a_syntax_error_has_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    write(notebook(code("import torch\n"), text_cell("x"), code("y = 1\nx = (\n")))
    (found,) = lint(capsys, "a.ipynb")
    assert (found["code"], found["cell"], found["line"]) == ("MPG000", 3, 2)


def test_other_languages_are_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    write(notebook(code("x <- (1\n"), kernelspec={"name": "ir", "language": "R"}))
    assert main(["lint", "a.ipynb"]) == 0
    assert capsys.readouterr().out == "No problems in 0 files.\n"


def test_configs_beside_a_notebook_are_not_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mp.yaml").write_text("distributed_type: FSDP\nmixed_precision: bf16\n")
    write(notebook(code('from accelerate import Accelerator\naccelerator = Accelerator(mixed_precision="fp16")\n')))
    assert lint(capsys, "--select", "MPG862", "a.ipynb", status=0) == []
    assert len(lint(capsys, "--select", "MPG862", "--config", "mp.yaml", "a.ipynb")) == 1


# -- magics -------------------------------------------------------------------------------------------


def program(*sources: str) -> str:
    return Notebook(json.dumps(notebook(*map(code, sources))).encode()).program


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("%matplotlib inline\nx = 1\n", "_                 \nx = 1\n"),
        ("if x:\n    !ls -l\ny = 2", "if x:\n    _     \ny = 2\n"),
        ("files = !ls\n", "files = _  \n"),
        ("t = %timeit -o f(1)\n", "t = _              \n"),
        ("torch.amp?\nx\n", "_         \nx\n"),
        ("?print\n", "_     \n"),
        ("!pip install \\\n  torch\nx = 1\n", "_             \n       \nx = 1\n"),
        ("pip install torch\n", "_                \n"),
        ("cd textlesslib\n", "_             \n"),
        ("import os\ncd ..\nls = [1]\nls\n", "import os\n_    \nls = [1]\nls\n"),
        ("x = cat if cat else rm\nrm in x\n", "x = cat if cat else rm\nrm in x\n"),
        ("%%time\nx = 1\n", "_     \nx = 1\n"),
        ("x = (1\n  % 2)\n", "x = (1\n  % 2)\n"),
        ("x = '''\n%no magic\n'''\n", "x = '''\n%no magic\n'''\n"),
        ('d["a=%s"] = "100%"  # 5%\n', 'd["a=%s"] = "100%"  # 5%\n'),
        ("x = a \\\n  % b\n", "x = a \\\n  % b\n"),
        ("a = b != c\n", "a = b != c\n"),
    ],
)
def test_magics_are_blanked_and_nothing_shifts(source: str, expected: str) -> None:
    assert program(source) == expected
    assert len(expected) == len(source) + (not source.endswith("\n"))


def test_many_comments_with_carriage_returns() -> None:
    """A regular expression that splits each `\\r\\n` in two ways would try all combinations."""
    comments = "# a comment\r\n" * 100
    assert (
        program(f"{comments}model = 1\n", f"{comments}%%time\nx = 1\n")
        == f"{comments}model = 1\n{comments}_     \nx = 1\n"
    )


def test_cells_of_other_languages_are_left_out() -> None:
    assert program("%%bash\nrm -r x\n", "x = 1", "%%writefile a.py\ny = (\n", "  \n", "y = 2") == "x = 1\ny = 2\n"


def test_an_indented_cell_runs_as_ipython_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"    {line}\n" for line in LOOP.splitlines())
    write(notebook(*TRAINING["cells"][:3], code("# why\n" + lines), code("z = 1")))
    (found,) = lint(capsys, "a.ipynb", "--select", "MPG000,MPG203")
    assert (found["code"], found["cell"], found["line"], found["column"]) == ("MPG203", 4, 6, 9)
    assert main(["lint", "--select", "MPG203", "--fix", "a.ipynb"]) == 0
    after = json.loads(Path("a.ipynb").read_bytes())["cells"][3]["source"]
    assert after == ["# why\n", *lines.replace("optimizer.step()", "scaler.step(optimizer)").splitlines(keepends=True)]


# -- fixes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"indent": 4}, {"indent": None}, {"ensure_ascii": True}, {"indent": "\t"}])
def test_a_fix_changes_one_line_and_nothing_else(how: dict[str, Any]) -> None:
    data = write(TRAINING, **how)
    assert main(["lint", "--select", "MPG203", "--fix", "a.ipynb"]) == 0
    place = data.rindex(b"    optimizer.step()\\n")  # before it, the same text stands in the outputs
    assert Path("a.ipynb").read_bytes() == data[:place] + data[place:].replace(
        b"optimizer.step()", b"scaler.step(optimizer)", 1
    )


@pytest.mark.parametrize("as_list", [True, False])
def test_a_fix_in_a_source_of_either_form(as_list: bool) -> None:
    before = notebook(*TRAINING["cells"][:3], code(LOOP, as_list))
    data = write(before)
    assert main(["lint", "--select", "MPG203", "--fix", "a.ipynb"]) == 0
    after = json.loads(Path("a.ipynb").read_bytes())
    expected = notebook(
        *TRAINING["cells"][:3], code(LOOP.replace("optimizer.step()", "scaler.step(optimizer)"), as_list)
    )
    assert after == expected
    assert Path("a.ipynb").read_bytes().endswith(data[-40:])


def test_bom_and_crlf_stay() -> None:
    data = b"\xef\xbb\xbf" + write(TRAINING).replace(b"\n", b"\r\n")
    Path("a.ipynb").write_bytes(data)
    assert main(["lint", "--select", "MPG203", "--fix", "a.ipynb"]) == 0
    after = Path("a.ipynb").read_bytes()
    assert after.startswith(b"\xef\xbb\xbf{\r\n") and after.count(b"\r\n") == data.count(b"\r\n")


def edited(cells: list[str], *edits: Edit) -> list[str]:
    found = Notebook(json.dumps(notebook(*map(code, cells)), indent=1).encode())
    after = json.loads(found.edited(edits))
    assert [list(cell) for cell in after["cells"]] == [
        ["cell_type", "execution_count", "metadata", "outputs", "source"]
    ] * len(cells)
    return ["".join(cell["source"]) for cell in after["cells"]]


def test_lines_are_added_removed_and_kept() -> None:
    assert edited(["a\nb\nc", "d"], Edit(2, 4, "")) == ["a\nc", "d"]
    assert edited(["a\nb\nc", "d"], Edit(2, 2, "x\ny\n")) == ["a\nx\ny\nb\nc", "d"]
    assert edited(["a", "d"], Edit(2, 2, "x\n")) == ["a", "x\nd"]
    assert edited(["a", "d"], Edit(3, 4, ";e\n")) == ["a", "d;e"]
    assert edited(["a", "d"], Edit(1, 1, ".b"), Edit(2, 3, "e")) == ["a.b", "e"]
    assert edited(["a", "d"], Edit(2, 4, "")) == ["a", ""]


def test_what_cannot_be_written_back_is_refused() -> None:
    found = Notebook(json.dumps(notebook(code("a\n"), code("!ls\nb\n"))).encode())
    with pytest.raises(EditRefused, match="spans two cells"):
        found.edited([Edit(0, 3, "x")])
    with pytest.raises(EditRefused, match="a magic"):
        found.edited([Edit(2, 7, "x")])
    assert found.edited([]) == json.dumps(notebook(code("a\n"), code("!ls\nb\n"))).encode()


def test_stdin_of_a_notebook(capsysbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    data = write(TRAINING)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    main(["lint", "--select", "MPG203", "--fix", "-", "--stdin-filename", "a.ipynb"])
    assert b"    scaler.step(optimizer)" in capsysbinary.readouterr().out


def test_broken_notebook_says_where() -> None:
    with pytest.raises(BrokenNotebook) as raised:
        Notebook(b'{"cells": [\n {"source" 1}]}')
    assert raised.value.offset == 23


@pytest.mark.parametrize(("loop", "reported"), [("", 0), ("for x in loader:\n    ", 1)])
def test_single_steps_by_hand_train_nothing(loop: str, reported: int, capsys: pytest.CaptureFixture[str]) -> None:
    model = "import torch\nmodel = torch.nn.Linear(8, 8).bfloat16()\noptimizer = torch.optim.AdamW(model.parameters())"
    step = f"{loop}model(x).sum().backward(); optimizer.step()"
    write(notebook(code(model), code(step)))
    assert [each["code"] for each in lint(capsys, status=bool(reported))] == ["MPG107"] * reported


def test_an_empty_file_is_no_broken_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.ipynb").write_text("\n")
    assert lint(capsys, status=0) == []
