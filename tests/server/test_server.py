"""`mpguard server` with a real client over stdio: the diagnostics, hovers and edits that an editor gets."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from distributions import install
from limits import seconds
from lsp_client import Editor, applied, editor, marked
from lsprotocol import types
from pygls.workspace import PositionCodec

from mpguard.lint.model import rule_page
from mpguard.lint.model.finding import Finding, Lines
from mpguard.lint.model.rule import rules
from mpguard.server import to_lsp
from mpguard.server.positions import PositionMapper
from mpguard.server.to_lsp import PublishedFinding

#: One finding with a safe fix (MPG302), one with an unsafe one (MPG201).
TRAIN = """\
import torch

def other(): "😀😀"; return torch.cuda.amp.GradScaler(enabled=False)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
"""
WIZARD = "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  amax_history_length: 16  # keep\n"


def session(test: Callable[[Path], Awaitable[None]]) -> Callable[[Path], None]:
    """A test that is a coroutine."""

    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def codes(diagnostics: list[types.Diagnostic]) -> list[Any]:
    return [each.code for each in diagnostics]


def lint(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mpguard", "lint", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds(120)).stdout


# -- the session itself -------------------------------------------------------------------------------


@session
async def test_it_announces_its_capabilities_and_exits_with_0(folder: Path) -> None:
    client = Editor()
    await client.start_io(sys.executable, "-m", "mpguard", "server", "--stdio")
    params = types.InitializeParams(types.ClientCapabilities(), root_uri=folder.as_uri())
    can = (await client.initialize_async(params)).capabilities
    assert can.position_encoding == "utf-16"
    assert can.hover_provider
    assert isinstance(can.code_action_provider, types.CodeActionOptions)
    assert "source.fixAll.mpguard" in (can.code_action_provider.code_action_kinds or ())
    client.initialized(types.InitializedParams())
    assert await client.leave() == 0
    assert client._server is not None and client._server.stderr is not None
    assert b"Traceback" not in await client._server.stderr.read()
    await client.stop()


@session
async def test_a_question_before_the_beginning_is_refused(folder: Path) -> None:
    client = Editor()
    await client.start_io(sys.executable, "-m", "mpguard", "server")
    with pytest.raises(Exception, match="initialized"):
        await client.hover((folder / "x.py").as_uri(), 0, 0)
    await client.initialize_async(types.InitializeParams(types.ClientCapabilities()))
    assert await client.leave() == 0
    await client.stop()


@session
async def test_an_editor_that_is_gone_leaves_no_server_behind(folder: Path) -> None:
    async with editor(folder) as client:
        client.exit(None)
        assert await client.status() == 1, "`exit` without `shutdown`"
    async with editor(folder) as client:
        assert client._server is not None and client._server.stdin is not None
        client._server.stdin.close()
        assert await client.status() == 1


def test_it_imports_no_torch() -> None:
    code = "import sys, mpguard.server.start; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60), check=True)
    assert {"pygls", "mpguard"} <= set(done.stdout.split())
    assert not {"torch", "accelerate", "rich"} & set(done.stdout.split())


def test_without_pygls_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['pygls'] = None; from mpguard.cli import main; sys.exit(main(['server']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds(60))
    assert done.returncode == 2
    assert done.stderr.endswith("needs `pygls`, which is not installed: pip install 'mpguard[server]'\n")
    assert done.stdout == ""


# -- findings -----------------------------------------------------------------------------------------


@session
async def test_findings_are_those_of_the_buffer_at_places_that_the_editor_counts(folder: Path) -> None:
    file = folder / "train.py"
    file.write_text("print('saved')\n")
    async with editor(folder) as client:
        uri = file.as_uri()
        old, backward = await client.open(uri, TRAIN)
        assert (old.code, old.severity, old.source) == ("MPG302", types.DiagnosticSeverity.Warning, "mpguard")
        assert marked(TRAIN, old.range) == "torch.cuda.amp.GradScaler(enabled=False)", (
            "the emoji before it are two units each"
        )
        assert (backward.code, marked(TRAIN, backward.range)) == ("MPG201", "loss.backward()")
        assert backward.message.startswith("FP16 autocast, but the gradients are never scaled\n")
        assert [marked(TRAIN, each.location.range) for each in backward.related_information or ()] == [
            'torch.autocast("cuda", dtype=torch.float16)',
            "optimizer.step()",
        ]
        assert await client.write(uri, "print(1)\n", 2) == []
        assert codes(await client.write(uri, TRAIN, 3)) == ["MPG302", "MPG201"]
        client.text_document_did_close(types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(uri)))
        await client.until(lambda: not client.published[uri].diagnostics)


@session
async def test_lines_are_the_editors_where_python_has_others(folder: Path) -> None:
    """`str.splitlines` ends lines at form feeds and U+2028 too; then an edit would land in another line."""
    text = "a = '\u2028\x0b'\r\n\x0c\r\nimport torch\rb = '😀'\r\nx = torch.cuda.amp.GradScaler()\r\n"
    async with editor(folder) as client:
        uri = (folder / "odd.py").as_uri()
        (found,) = await client.open(uri, text)
        assert marked(text, found.range) == "torch.cuda.amp.GradScaler()"
        gone = types.Range(types.Position(4, 4), types.Position(4, 31))
        assert marked(text, gone) == "torch.cuda.amp.GradScaler()"
        assert await client.change(uri, 2, types.TextDocumentContentChangePartial(gone, "None")) == []
        after_emoji = types.Range(types.Position(3, 8), types.Position(3, 8))
        typed = types.TextDocumentContentChangePartial(after_emoji, "; y = torch.cuda.amp.GradScaler()")
        (found,) = await client.change(uri, 3, typed)
        expected = text.replace("x = torch.cuda.amp.GradScaler()", "x = None").replace("'\r\nx", f"'{typed.text}\r\nx")
        assert marked(expected, found.range) == "torch.cuda.amp.GradScaler()"


@session
async def test_a_text_is_what_the_editor_says_whatever_its_coding_line_is(folder: Path) -> None:
    text = f"# -*- coding: latin-1 -*-\n{TRAIN}".replace("😀", "é")
    async with editor(folder) as client:
        old, _ = await client.open((folder / "latin.py").as_uri(), text)
        assert marked(text, old.range) == "torch.cuda.amp.GradScaler(enabled=False)"


@session
async def test_a_byte_order_mark_counts_where_the_editor_keeps_it(folder: Path) -> None:
    text = "\ufeffimport torch; x = torch.cuda.amp.GradScaler()\ny = torch.cuda.amp.GradScaler()\n"
    async with editor(folder) as client:
        uri = (folder / "marked.py").as_uri()
        found = await client.open(uri, text)
        assert [marked(text, each.range) for each in found] == ["torch.cuda.amp.GradScaler()"] * 2
        for action in (await client.actions(uri, found[0].range, resolve=True)).values():
            after = applied(client.texts, action.edit)[uri]
            assert after.count("\ufeff") == 1 and after.startswith("\ufeffimport torch; x = torch."), action.title


@session
async def test_what_does_not_parse_is_said_and_forgotten_when_it_does(folder: Path) -> None:
    async with editor(folder) as client:
        uri = (folder / "train.py").as_uri()
        broken = TRAIN.replace("model(x) - y", "model(x - y")
        (found,) = await client.open(uri, broken)
        assert found.code == "MPG000" and found.message.startswith("syntax error")
        assert codes(await client.write(uri, TRAIN, 2)) == ["MPG302", "MPG201"]
        assert codes(await client.write(uri, "scale = autocast = " + "(" * 3000, 3)) in (["MPG000"], [])
        assert codes(await client.write(uri, TRAIN, 4)) == ["MPG302", "MPG201"]


@session
async def test_configs_scripts_and_texts_without_a_file(folder: Path) -> None:
    async with editor(folder) as client:
        (found,) = await client.open((folder / "mp.yaml").as_uri(), WIZARD, "yaml")
        assert marked(WIZARD, found.range) == "amax_history_length"
        both = '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}'
        assert "MPG821" in codes(await client.open((folder / "ds.json").as_uri(), both, "json"))
        assert await client.open((folder / "package.json").as_uri(), '{"name": "x", broken', "json") == []
        launch = "accelerate launch train.py --config_file mp.yaml\n"
        assert codes(await client.open((folder / "run.sh").as_uri(), launch, "shellscript"))
        assert codes(await client.open("untitled:Untitled-1", TRAIN)) == ["MPG302", "MPG201"]
        assert codes(await client.open("untitled:Untitled-2", WIZARD, "yaml")) == ["MPG801"]
        assert await client.open((folder / "notes.txt").as_uri(), TRAIN, "plaintext") == []
        old = types.TextDocumentItem(f"git:{folder}/train.py?HEAD", "python", 1, TRAIN)
        client.text_document_did_open(types.DidOpenTextDocumentParams(old))
        assert await client.hover(old.uri, 8, 6) is None, "another program's view of it"
        assert old.uri not in client.published


@session
async def test_what_is_excluded_or_installed_is_left_alone(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[tool.mpguard]\nexclude = ["generated/"]\n')
    async with editor(folder) as client:
        for name in ("generated/a.py", ".venv/lib/site-packages/b.py"):
            assert await client.open((folder / name).as_uri(), TRAIN) == [], name
        assert len(await client.open((folder / "train.py").as_uri(), TRAIN)) == 2


# -- actions ------------------------------------------------------------------------------------------


@session
async def test_actions_do_what_the_command_line_does(folder: Path) -> None:
    train = TRAIN.replace("\n", "\r\n")
    file = folder / "train.py"
    file.write_bytes(train.encode())
    async with editor(folder) as client:
        uri = file.as_uri()
        old, backward = await client.open(uri, train)

        def after(action: types.CodeAction) -> str:
            assert action.edit is not None
            for each in action.edit.document_changes or ():
                assert isinstance(each, types.TextDocumentEdit) and each.text_document.version == 1
            return applied(client.texts, action.edit)[uri]

        actions = await client.actions(uri, old.range, resolve=True)
        fix, suppress, fix_all = actions.values()
        assert (fix.kind, fix.is_preferred) == ("quickfix", True)
        assert (suppress.title, suppress.kind, suppress.is_preferred) == (
            "Suppress MPG302 here (# noqa)", "quickfix", None,
        )  # fmt: skip
        assert fix_all.kind == "source.fixAll.mpguard"
        lint(folder, "--fix", "train.py")
        assert after(fix) == after(fix_all) == file.read_bytes().decode() != train
        assert after(suppress) == train.replace("False)\r", "False)  # noqa: MPG302\r")

        unsafe, _, _ = (await client.actions(uri, backward.range, resolve=True)).values()
        assert "unsafe" in unsafe.title and unsafe.is_preferred is None
        file.write_bytes(train.encode())
        lint(folder, "--unsafe-fixes", "--select", "MPG201", "train.py")
        assert after(unsafe) == file.read_bytes().decode()

        everywhere = types.Range(types.Position(0, 0), types.Position(99, 0))
        only = await client.actions(uri, everywhere, ["source.fixAll"])
        assert list(only) == [fix_all.title]
        assert await client.actions(uri, everywhere, ["refactor"]) == {}
        assert list(await client.actions(uri, types.Range(types.Position(0, 0), types.Position(0, 1)))) == [
            fix_all.title
        ]


@session
async def test_an_action_for_a_text_that_has_changed_is_not_done(folder: Path) -> None:
    async with editor(folder) as client:
        uri = (folder / "train.py").as_uri()
        old, _ = await client.open(uri, TRAIN)
        fix = next(iter((await client.actions(uri, old.range)).values()))
        await client.write(uri, "\n" + TRAIN, 2)
        assert (await client.code_action_resolve_async(fix)).edit is None
        await client.until(lambda: any("has changed" in each for each in client.messages))


@session
async def test_an_editor_of_old_gets_actions_whole(folder: Path) -> None:
    async with editor(folder, capabilities={}) as client:
        uri = (folder / "mp.yaml").as_uri()
        (found,) = await client.open(uri, WIZARD, "yaml")
        rename, suppress, _ = (await client.actions(uri, found.range)).values()
        assert applied(client.texts, rename.edit)[uri] == WIZARD.replace("length", "len")
        assert applied(client.texts, suppress.edit)[uri] == WIZARD.replace("# keep", "# keep  # noqa: MPG801")
        as_json = (folder / "mp.json").as_uri()
        text = json.dumps({"distributed_type": "FSDP", "fp8_config": {"backend": "TE", "amax_history_length": 16}})
        found = next(each for each in await client.open(as_json, text, "json") if each.code == "MPG801")
        assert not any("Suppress" in title for title in await client.actions(as_json, found.range)), "no comments there"


def test_a_finding_links_to_its_page_where_there_is_a_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("MPG201", "missing-grad-scaler", "error", "a.py", 1, 1, 1, 5, "message")
    mapper = PositionMapper(Lines("code\n"), PositionCodec())
    published = PublishedFinding("file:///a.py", mapper.range((1, 1), (1, 5)), finding)
    monkeypatch.setattr(to_lsp, "manual_url", lambda code: "")
    assert to_lsp.diagnostic(published, mapper, lambda _: None).code_description is None
    monkeypatch.setattr(to_lsp, "manual_url", "https://example.org/rules/{}".format)
    made = to_lsp.diagnostic(published, mapper, lambda _: None)
    assert made.code_description == types.CodeDescription("https://example.org/rules/MPG201")


@session
async def test_hovering_over_a_finding_shows_its_page(folder: Path) -> None:
    async with editor(folder) as client:
        uri = (folder / "train.py").as_uri()
        await client.open(uri, TRAIN)
        assert await client.hover(uri, 8, 6) == rule_page.page(rules()["MPG201"])
        assert await client.hover(uri, 4, 6) is None
        assert await client.hover("file:///never/opened.py", 0, 0) is None


# -- what lies around -----------------------------------------------------------------------------------


@session
async def test_settings_are_read_again_when_they_change(folder: Path) -> None:
    settings = folder / "pyproject.toml"
    settings.write_text("[tool.mpguard]\n")
    async with editor(folder) as client:
        await client.until(lambda: client.watchers)
        uri = (folder / "train.py").as_uri()
        assert codes(await client.open(uri, TRAIN)) == ["MPG302", "MPG201"]
        settings.write_text('[tool.mpguard]\nignore = ["MPG302"]\n')
        client.files_changed(settings)
        assert codes(await client.next_diagnostics(uri)) == ["MPG201"]
        settings.write_text('[tool.mpguard]\nignroe = ["MPG302"]\n')
        client.files_changed(settings)
        await client.until(lambda: any("did you mean `ignore`" in each for each in client.messages))
        settings.unlink()
        client.files_changed(settings)
        await client.until(lambda: len(client.published[uri].diagnostics) == 2)
        assert sum("ignroe" in each for each in client.messages) == 1


@session
async def test_saving_one_file_checks_those_that_rest_on_it(folder: Path) -> None:
    config = folder / "mp.yaml"
    config.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    text = 'from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision="bf16")\n'
    (folder / "train.py").write_text(text)
    async with editor(folder) as client:
        uri = (folder / "train.py").as_uri()
        before = codes(await client.open(uri, text))
        config.write_text("distributed_type: MULTI_GPU\nmixed_precision: fp16\n")
        saved = types.DidSaveTextDocumentParams(types.TextDocumentIdentifier(config.as_uri()))
        client.text_document_did_save(saved)
        after = codes(await client.next_diagnostics(uri))
        assert set(after) - set(before), (before, after)
        config.unlink()
        client.files_changed(config)
        assert codes(await client.next_diagnostics(uri)) == []


@session
async def test_what_rests_on_an_unsaved_file_is_checked_as_that_is_typed(folder: Path) -> None:
    config, module = folder / "mp.yaml", folder / "precision.py"
    config.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\n")
    module.write_text("import torch\n\nLOW = torch.bfloat16\n")
    launched = 'from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision="bf16")\n'
    importing = "from precision import LOW\n" + TRAIN.replace("torch.float16", "LOW")
    async with editor(folder) as client:
        first, second = (folder / "launched.py").as_uri(), (folder / "importing.py").as_uri()

        async def until(uri: str, text: str, present: bool = True) -> None:
            await client.until(lambda: (text in str(client.published[uri].diagnostics)) == present, text)

        def close(file: Path) -> None:
            client.text_document_did_close(
                types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(file.as_uri()))
            )

        assert "is `bf16` in the launch config already" in str(await client.open(first, launched))
        assert codes(await client.open(second, importing)) == ["MPG302"]
        assert await client.open(config.as_uri(), config.read_text(), "yaml") == []
        await client.write(config.as_uri(), config.read_text().replace("bf16", "fp16"), 2)
        await until(first, "is `bf16`, the launch config has `fp16`")
        close(config)
        await until(first, "is `bf16` in the launch config already")
        await client.open(module.as_uri(), module.read_text().replace("bfloat16", "float16"))
        await until(second, "MPG201")
        close(module)
        await until(second, "MPG201", False)


@session
async def test_the_editors_settings_are_asked_for_and_judged(folder: Path) -> None:
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    (other / "mpguard.toml").write_text('ignore = ["MPG201"]\n')
    mine = {None: {"ignore": ["MPG302"]}, one.as_uri(): {"select": ["MPG302"]}, other.as_uri(): None}
    async with editor(one, other, settings=mine) as client:
        await client.until(lambda: client.watchers)
        assert "workspace/didChangeConfiguration" in client.registered, "else some editors never say it"
        first, second = (one / "train.py").as_uri(), (other / "train.py").as_uri()
        await client.open(first, TRAIN)
        await client.open(second, TRAIN)
        await client.until(lambda: codes(list(client.published[first].diagnostics)) == ["MPG302"])
        await client.until(lambda: codes(list(client.published[second].diagnostics)) == [])
        for wrong, message in (
            ({"slect": []}, "there is no setting `mpguard.slect`; did you mean `select`?"),
            ({"select": "MPG302"}, "a list of codes is needed"),
            ({"select": ["MPG320"]}, "there is no rule `MPG320`"),
            ({"configs": ["none.yaml"]}, "no such file"),
            ({"gpu": "h1000"}, "h1000"),
        ):
            client.settings[one.as_uri()] = wrong
            client.workspace_did_change_configuration(types.DidChangeConfigurationParams(None))
            await client.until(lambda: any(message in each for each in client.messages), message)  # noqa: B023
        client.settings[one.as_uri()] = {}
        client.workspace_did_change_configuration(types.DidChangeConfigurationParams(None))
        await client.until(lambda: codes(list(client.published[first].diagnostics)) == ["MPG302", "MPG201"])


@session
async def test_settings_that_come_with_the_start_or_are_pushed(folder: Path) -> None:
    async with editor(folder, capabilities={}, options={"mpguard": {"ignore": ["MPG302"]}}) as client:
        uri = (folder / "train.py").as_uri()
        assert codes(await client.open(uri, TRAIN)) == ["MPG201"]
        pushed = {"mpguard": {"select": ["MPG302"]}}
        client.workspace_did_change_configuration(types.DidChangeConfigurationParams(pushed))
        assert codes(await client.next_diagnostics(uri)) == ["MPG302"]
    (folder / "mpguard.toml").write_text('select = ["MPG999"]\n')
    async with editor(folder, arguments=("--isolated",)) as client:
        assert len(await client.open(uri, TRAIN)) == 2
        assert client.messages == []


# -- notebooks ----------------------------------------------------------------------------------------


@session
async def test_a_notebook_is_one_program_and_its_cells_are_texts(folder: Path) -> None:
    cells = ["import torch\n", "%matplotlib inline\ns = '😀'; x = torch.cuda.amp.GradScaler()", "# text"]
    uris = [f"vscode-notebook-cell:{folder}/a.ipynb#X{number}" for number in range(4)]
    notebook = (folder / "a.ipynb").as_uri()
    async with editor(folder) as client:
        client.texts = dict(zip(uris, cells, strict=False))
        kinds = (types.NotebookCellKind.Code, types.NotebookCellKind.Code, types.NotebookCellKind.Markup)
        document = types.NotebookDocument(
            notebook, "jupyter-notebook", 1, [types.NotebookCell(k, u) for k, u in zip(kinds, uris, strict=False)]
        )
        items = [
            types.TextDocumentItem(uri, "python" if kind == 2 else "markdown", 1, text)
            for uri, kind, text in zip(uris, kinds, cells, strict=False)
        ]
        client.notebook_document_did_open(types.DidOpenNotebookDocumentParams(document, items))
        await client.until(lambda: set(uris[:3]) <= set(client.published))
        (found,) = client.published[uris[1]].diagnostics
        assert (found.code, marked(cells[1], found.range)) == ("MPG302", "torch.cuda.amp.GradScaler()")
        assert not client.published[uris[0]].diagnostics
        fix = next(iter((await client.actions(uris[1], found.range, resolve=True)).values()))
        after = applied(client.texts, fix.edit)
        assert after == {
            **client.texts,
            uris[1]: cells[1].replace("torch.cuda.amp.GradScaler()", 'torch.amp.GradScaler("cuda")'),
        }

        typed = types.TextDocumentContentChangePartial(
            types.Range(types.Position(1, 10), types.Position(1, 41)), "x = 1"
        )
        changes = types.NotebookDocumentChangeEvent(
            cells=types.NotebookDocumentCellChanges(
                text_content=[
                    types.NotebookDocumentCellContentChanges(types.VersionedTextDocumentIdentifier(2, uris[1]), [typed])
                ]
            )
        )
        identifier = types.VersionedNotebookDocumentIdentifier(2, notebook)
        client.notebook_document_did_change(types.DidChangeNotebookDocumentParams(identifier, changes))
        assert await client.diagnostics(uris[1], 2) == []


# -- what goes wrong ----------------------------------------------------------------------------------

NOISY = """
from mpguard.lint.model.rule import Rule

class Noisy(Rule):
    '''What it does.'''
    code, name, severity, message = "OUR001", "noisy", "error", "of theirs"

    def check(self, facts):
        print("Content-Length: 3\\r\\n\\r\\nrubbish")
        raise ZeroDivisionError("oops")
"""


def of_theirs(folder: Path, rule: str) -> str:
    """Installs a rule of another distribution; returns the PYTHONPATH that has it."""
    install(folder / "site", rule)
    return os.pathsep.join(filter(None, (str(folder / "site"), os.environ.get("PYTHONPATH"))))


@session
async def test_a_rule_that_prints_and_raises_is_said_once_and_ends_nothing(folder: Path) -> None:
    path = of_theirs(folder, NOISY)
    work = folder / "work"
    work.mkdir()
    async with editor(work, PYTHONPATH=path) as client:
        uri = (work / "train.py").as_uri()
        assert codes(await client.open(uri, TRAIN)) == ["MPG302", "MPG201"], "ours are there"
        assert codes(await client.write(uri, TRAIN + "\n", 2)) == ["MPG302", "MPG201"]
        (message,) = client.messages
        assert "defect in OUR001 (of their_rules): ZeroDivisionError: oops" in message
    (folder / "site" / "their_rules" / "__init__.py").write_text("import nothing_of_that_name")
    async with editor(work, PYTHONPATH=path) as client:
        assert codes(await client.open(uri, TRAIN)) == ["MPG302", "MPG201"]
        await client.until(lambda: any("does not import" in each for each in client.messages))


ENDLESS = """
from mpguard.lint.model.rule import Rule

class Endless(Rule):
    '''What it does.'''
    code, name, severity, message = "OUR001", "endless", "error", "of theirs"

    def check(self, facts):
        if "endless" in facts.source.text:
            open(facts.path + ".begun", "w").close()
        while "endless" in facts.source.text:
            pass
        return iter(())
"""


@session
async def test_a_check_without_end_is_ended_and_the_server_goes_on(folder: Path) -> None:
    path = of_theirs(folder, ENDLESS)
    code = (
        "import sys; from mpguard.lint.run import timeout; timeout.SECONDS = 2\n"
        "from mpguard.cli import main; sys.exit(main(['server']))"
    )
    async with editor(folder, command=(sys.executable, "-c", code), PYTHONPATH=path) as client:
        good, bad = (folder / "train.py").as_uri(), (folder / "endless.py").as_uri()
        await client.open(good, TRAIN)
        item = types.TextDocumentItem(bad, "python", 1, TRAIN + "endless = 1\n")
        client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        assert await client.hover(good, 8, 6) == rule_page.page(rules()["MPG201"])
        (found,) = await client.diagnostics(bad, 1)
        assert found.code == "MPG000" and found.message.startswith("parse limit: still not checked after 2 s")
        assert len(await client.write(good, TRAIN + "\n", 2)) == 2


@session
async def test_an_editor_that_leaves_does_not_wait_for_a_check(folder: Path) -> None:
    code = (
        "import sys; from mpguard.lint.run import timeout; timeout.SECONDS = 1e6\n"  # a wait for it would not end
        "from mpguard.cli import main; sys.exit(main(['server']))"
    )
    path = of_theirs(folder, ENDLESS)
    async with editor(folder, command=(sys.executable, "-c", code), PYTHONPATH=path) as client:
        item = types.TextDocumentItem((folder / "endless.py").as_uri(), "python", 1, TRAIN + "endless = 1\n")
        client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        while not (folder / "endless.py.begun").exists():
            await asyncio.sleep(0.05)
        assert await client.leave() == 0


@session
async def test_a_file_that_is_deleted_and_changes_that_make_no_sense(folder: Path) -> None:
    file = folder / "train.py"
    file.write_text(TRAIN)
    async with editor(folder) as client:
        uri = file.as_uri()
        await client.open(uri, TRAIN)
        file.unlink()
        client.workspace_did_change_watched_files(
            types.DidChangeWatchedFilesParams([types.FileEvent(uri, types.FileChangeType.Deleted)])
        )
        assert codes(await client.next_diagnostics(uri)) == ["MPG302", "MPG201"], "the buffer is still open"
        nowhere = types.VersionedTextDocumentIdentifier(7, "file:///never/opened.py")
        whole = types.TextDocumentContentChangeWholeDocument("x")
        client.text_document_did_change(types.DidChangeTextDocumentParams(nowhere, [whole]))
        assert len(await client.write(uri, TRAIN, 2)) == 2, "the server goes on"
