"""One session with an editor: its buffers, what was last said about each, and when each is checked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

from mpguard.core.errors import ConfigError, MpguardError
from mpguard.core.version import __version__
from mpguard.lint.model.finding import Finding, Lines, PlacedNote
from mpguard.lint.model.result import FileReport
from mpguard.lint.source.files import PYTHON
from mpguard.server import client_settings, to_lsp
from mpguard.server.checker import MARK, Action, Buffer, BufferChange, Checker, encoded
from mpguard.server.client_settings import ClientSettings
from mpguard.server.jobs import Jobs
from mpguard.server.positions import PositionMapper
from mpguard.server.to_lsp import PublishedFinding

#: Seconds without a further keystroke before a text is checked, and without a further change of files before all are.
TYPING, SAVING = 0.01, 0.2
#: Seconds after which files are read again where the editor does not say when they change.
UNWATCHED = 5

#: Of what is checked: files, and what is nowhere yet. Others are shown for looking (an old version, a log).
_SCHEMES = ("file", "untitled")

#: Files that findings may rest on.
_WATCHED = (
    "**/*.{py,yaml,yml,json,toml,sh,bash,slurm,sbatch,mk}",
    "**/{Makefile,README*,requirements*.txt,setup.cfg}",
)

_NOTEBOOKS = types.NotebookDocumentSyncOptions(
    [
        types.NotebookDocumentFilterWithNotebook(
            notebook="jupyter-notebook", cells=[types.NotebookCellLanguage(language="python")]
        )
    ],
    save=True,
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was last said about a buffer. texts: the URIs of its texts (of the cells of a notebook), in order.

    rests_on: the other files that were read for it.
    """

    buffer: Buffer
    report: FileReport | None
    texts: tuple[str, ...]
    rests_on: frozenset[str] = frozenset()
    shown: tuple[PublishedFinding, ...] = ()
    diagnostics: tuple[types.Diagnostic, ...] = ()


class Session(LanguageServer):
    """Everything here runs in the thread that speaks with the editor; `jobs` does what takes time.

    trouble: what went wrong before there was an editor to tell.
    """

    def __init__(self, checker: Checker, jobs: Jobs, trouble: MpguardError | None = None) -> None:
        super().__init__("mpguard", __version__, notebook_document_sync=_NOTEBOOKS)
        self.checker, self.jobs, self.trouble = checker, jobs, trouble
        self.wishes: dict[str | None, ClientSettings] = {None: ClientSettings()}
        self.answers: dict[str, Answer] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._said: set[str] = set()
        self._trouble: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched = False
        self._read = 0.0

    # -- buffers ----------------------------------------------------------------------------------

    def owner(self, uri: str) -> str:
        """The notebook of a cell; other texts are their own."""
        notebook = self.workspace.get_notebook_document(cell_uri=uri)
        return uri if notebook is None else notebook.uri

    def open(self) -> list[str]:
        """The URIs of all that is open: texts, and notebooks."""
        notebooks = [each.uri for each in self.workspace.notebook_documents.values()]
        texts = [each.uri for each in self.workspace.text_documents.values()]
        return notebooks + [uri for uri in texts if self.owner(uri) == uri]

    def buffer(self, uri: str) -> tuple[Buffer, tuple[str, ...]] | None:
        """What is open under a URI now, with the URIs of its texts; None where nothing is."""
        if uris.urlparse(uri)[0] not in _SCHEMES:
            return None
        notebook = self.workspace.get_notebook_document(notebook_uri=uri)
        if notebook is not None:
            documents = [self.workspace.get_text_document(cell.document) for cell in notebook.cells]
            cells = tuple(
                (document.source, cell.kind == types.NotebookCellKind.Code and document.language_id == "python")
                for cell, document in zip(notebook.cells, documents, strict=True)
            )
            path, folder, asked = self._place(uri)
            return Buffer(path, "", "", folder, asked, cells), tuple(each.uri for each in documents)
        open_texts = self.workspace.text_documents.values()
        text = next((each for each in open_texts if each.uri == uri), None)
        if text is None:
            return None
        path, folder, asked = self._place(uri)
        return Buffer(path, text.language_id or "", text.source, folder, asked), (uri,)

    def _place(self, uri: str) -> tuple[str, Path, ClientSettings]:
        """Where a URI lies, or would be saved: its path, its workspace folder, and what is asked for there."""
        path = uris.to_fs_path(uri)
        folders = [(Path(found), each.uri) for each in self._folders() if (found := uris.to_fs_path(each.uri))]
        if path is None:
            name = Path(uris.urlparse(uri)[2]).name or "untitled"
            path = str((folders[0][0] if folders else Path.cwd()) / name)
        around = [pair for pair in folders if Path(path).is_relative_to(pair[0])]
        if not around:
            return path, Path(path).parent, self.wishes[None]
        folder, key = max(around, key=lambda pair: len(pair[0].parts))
        return path, folder, self.wishes.get(key, self.wishes[None])

    def _folders(self) -> list[types.WorkspaceFolder]:
        folders = list(self.workspace.folders.values())
        root = self.workspace.root_uri
        return folders or ([types.WorkspaceFolder(root, "")] if root else [])

    # -- checking ---------------------------------------------------------------------------------

    def soon(self, uri: str, delay: float = TYPING) -> None:
        """Checks a buffer when nothing has changed in it for a moment; those that are typed into come first."""
        before = self._waiting.pop(uri, None)
        if before is not None:
            before.cancel()
        self._waiting[uri] = asyncio.ensure_future(self._later(uri, delay))

    def recheck_all(self) -> None:
        """Files or settings have changed: what is known of them is forgotten, and all that is open is checked."""
        self.soon("", SAVING)
        for uri in self.open():
            self.soon(uri, SAVING)

    async def _later(self, uri: str, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await (self.checked(uri, delay < SAVING) if uri else self.jobs.do(self.checker.forget))
        except Exception as error:
            self.say(f"a defect of the server: {error!r}", once=repr(error), more=traceback.format_exc())
        self._waiting.pop(uri, None)

    async def checked(self, uri: str, waits: bool = True) -> Answer | None:
        """What there is to say about a buffer as it is now: it is checked, and published, unless it has not changed.

        waits: whether somebody looks at it.
        """
        now = self.buffer(uri)
        if now is None:
            return None
        known = self.answers.get(uri)
        if known is not None and (known.buffer, known.texts) == now and uri not in self._waiting:
            return known
        buffer, texts = now
        try:
            await self._refreshed()
            said = await self.jobs.do(functools.partial(self.checker.report, buffer, self._unsaved(buffer.path)), waits)
            self._trouble.pop(uri, None)
        except ConfigError as error:
            if str(error) not in self._trouble.values():
                self.say(str(error))
            self._trouble[uri] = str(error)
            said = None
        if self.buffer(uri) != now:
            return None  # it has changed in the meantime, and waits for its next turn
        report, rests_on = (said.report, said.rests_on) if said else (None, frozenset[str]())
        answer = self._answered(Answer(buffer, report, texts, rests_on))
        self._publish(uri, answer)
        if not _is_saved(buffer) if known is None else known.buffer.text != buffer.text:
            self._ripple(buffer.path)
        return answer

    def _unsaved(self, path: str) -> dict[str, bytes]:
        """What other open files hold, by their paths."""
        texts = self.workspace.text_documents.values()
        found = {uris.to_fs_path(each.uri): each.source for each in texts if uris.urlparse(each.uri)[0] == "file"}
        return {name: encoded(text, name.endswith(PYTHON)) for name, text in found.items() if name and name != path}

    def _ripple(self, path: str) -> None:
        """An open file holds something else: what rests on it is checked again, when nobody waits for anything."""
        resting = [uri for uri, answer in self.answers.items() if path in answer.rests_on]
        self._aside(self.jobs.do(functools.partial(self.checker.changed, path)))
        for uri in resting:
            self.soon(uri, SAVING)

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # asyncio itself keeps no task alive
        task.add_done_callback(self._tasks.discard)

    async def _refreshed(self) -> None:
        """Files that nobody watches may have changed: what is known of them is forgotten now and then."""
        now = asyncio.get_running_loop().time()
        if not self._watched and now > self._read + UNWATCHED:
            self._read = now
            await self.jobs.do(self.checker.forget)

    def _answered(self, answer: Answer) -> Answer:
        shown, said = [], []
        for finding in answer.report.findings if answer.report else ():
            index = (finding.cell or 1) - 1
            ruler = self._ruler(answer, index)
            place = ruler.range((finding.line, finding.column), (finding.end_line, finding.end_column))
            shown.append(PublishedFinding(answer.texts[index], place, finding))
            elsewhere = functools.partial(self._elsewhere, answer, finding)
            said.append(to_lsp.diagnostic(shown[-1], ruler, elsewhere))
        for defect in answer.report.defects if answer.report else ():
            self.say(str(defect), once=f"{defect.code} {defect.error}", more=defect.traceback)
        return dataclasses.replace(answer, shown=tuple(shown), diagnostics=tuple(said))

    def _elsewhere(self, answer: Answer, finding: Finding, note: PlacedNote) -> types.Location | None:
        path, mark, cell = (note.path or "").rpartition(":cell ")
        if mark and path == finding.path and note.start and note.end:
            index = int(cell) - 1
            return types.Location(answer.texts[index], self._ruler(answer, index).range(note.start, note.end))
        return to_lsp.location(note, lambda line: PositionMapper(Lines(line), self.workspace.position_codec))

    def _ruler(self, answer: Answer, index: int) -> PositionMapper:
        cells = answer.buffer.cells
        if cells is not None:
            return PositionMapper(_lines(cells[index][0]), self.workspace.position_codec)
        text = answer.buffer.text.removeprefix(MARK)
        return PositionMapper(_lines(text), self.workspace.position_codec, MARK if text != answer.buffer.text else "")

    def _publish(self, uri: str, answer: Answer) -> None:
        before = self.answers.get(uri)
        self.answers[uri] = answer
        for text in dict.fromkeys((*answer.texts, *(before.texts if before else ()))):
            found = [said for said, shown in zip(answer.diagnostics, answer.shown, strict=True) if shown.uri == text]
            version = self.workspace.get_text_document(text).version if text in answer.texts else None
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(text, found, version))

    def closed(self, uri: str) -> None:
        """A buffer is gone: nothing is said about it any more."""
        waiting = self._waiting.pop(uri, None)
        if waiting is not None:
            waiting.cancel()
        answer = self.answers.pop(uri, None)
        if answer is not None and not _is_saved(answer.buffer):
            self._ripple(answer.buffer.path)  # it holds what the disk does, from here on
        for text in answer.texts if answer else ():
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(text, []))

    # -- actions ----------------------------------------------------------------------------------

    async def change(
        self, uri: str, answer: Answer, action: Action, shown: PublishedFinding | None
    ) -> types.WorkspaceEdit | str:
        """What an action does to the texts of a buffer, or why it cannot be done."""
        finding = shown.finding if shown else None
        try:
            made = await self.jobs.do(functools.partial(self.checker.change, answer.buffer, action, finding))
        except ConfigError as error:
            made = BufferChange(problem=str(error))
        if made.problem:
            return made.problem
        if self.buffer(uri) != (answer.buffer, answer.texts):
            return "the text has changed in the meantime"
        edits: dict[str, list[types.TextEdit]] = {}
        for index, (text, after) in enumerate(zip(answer.texts, made.texts, strict=True)):
            changed = self._ruler(answer, index).edits(after)
            if changed:
                edits[text] = changed
        able = self.client_capabilities.workspace and self.client_capabilities.workspace.workspace_edit
        if not (able and able.document_changes):
            return types.WorkspaceEdit(changes=dict(edits))
        versions = {text: self.workspace.get_text_document(text).version for text in edits}
        return types.WorkspaceEdit(
            document_changes=[
                types.TextDocumentEdit(types.OptionalVersionedTextDocumentIdentifier(text, versions[text]), list(each))
                for text, each in edits.items()
            ]
        )

    # -- settings ---------------------------------------------------------------------------------

    def wish(self, given: object, folder: str | None = None) -> None:
        """Takes the editor's settings, for a workspace folder or for all; what is wrong in them is said."""
        try:
            self.wishes[folder] = client_settings.read(given)
        except MpguardError as error:
            self.say(str(error))

    async def ask_for_wishes(self) -> None:
        """Asks the editor for its settings, if it can be asked."""
        able = self.client_capabilities.workspace
        if able is None or not able.configuration:
            return
        folders = [each.uri for each in self._folders()]
        items = [types.ConfigurationItem(scope, client_settings.SECTION) for scope in (None, *folders)]
        given = await self.workspace_configuration_async(types.ConfigurationParams(items))
        for folder, each in zip((None, *folders), given, strict=False):
            if each is not None:
                self.wish(each, folder)
            elif folder is not None:
                self.wishes.pop(folder, None)
        self.recheck_all()

    async def be_told(self) -> None:
        """Asks the editor to say when its settings change, and files that findings may rest on, if it can."""
        able = self.client_capabilities.workspace
        made: list[types.Registration] = []
        if able and able.did_change_configuration and able.did_change_configuration.dynamic_registration:
            section = types.DidChangeConfigurationRegistrationOptions(client_settings.SECTION)
            made.append(types.Registration("mpguard-settings", types.WORKSPACE_DID_CHANGE_CONFIGURATION, section))
        watches = able and able.did_change_watched_files and able.did_change_watched_files.dynamic_registration
        if watches:
            watchers: list[Any] = [types.FileSystemWatcher(pattern) for pattern in _WATCHED]
            files = types.DidChangeWatchedFilesRegistrationOptions(watchers)
            made.append(types.Registration("mpguard-files", types.WORKSPACE_DID_CHANGE_WATCHED_FILES, files))
        if made:
            await self.client_register_capability_async(types.RegistrationParams(made))
        self._watched = bool(watches)

    # -- talk -------------------------------------------------------------------------------------

    def say(self, message: str, once: str = "", more: str = "") -> None:
        """An error that the user sees. once: what it is about, where it is said once. more: for the log."""
        if once and once in self._said:
            return
        self._said.add(once)
        self.window_show_message(types.ShowMessageParams(types.MessageType.Error, f"mpguard: {message}"))
        if more:
            self.window_log_message(types.LogMessageParams(types.MessageType.Error, more))

    def report_server_error(self, error: Exception, source: Any) -> None:
        """pygls' own errors; those of requests are answers already."""
        with contextlib.suppress(Exception):
            super().report_server_error(error, source)


def _is_saved(buffer: Buffer) -> bool:
    try:
        return Path(buffer.path).read_bytes() == encoded(buffer.text)
    except OSError:
        return False


@functools.lru_cache(16)
def _lines(text: str) -> Lines:
    """Many findings in one text share them."""
    return Lines(text)
