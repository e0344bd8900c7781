"""A session with an editor: its buffers, what was published for each, and when each is checked."""

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
from mpguard.server.checker import BOM, Action, Buffer, BufferChange, Checker, encode
from mpguard.server.client_settings import ClientSettings
from mpguard.server.jobs import Jobs
from mpguard.server.positions import PositionMapper
from mpguard.server.to_lsp import PublishedFinding

#: Seconds without another keystroke before a text is checked, and without another file change before all texts are.
TYPING, SAVING = 0.01, 0.2
#: Seconds after which files are read again if the editor does not report changes of files.
UNWATCHED = 5

#: Schemes of URIs that are checked: files, and new documents. Others are read-only views (an old version, a log).
_SCHEMES = ("file", "untitled")

#: Files that findings may depend on.
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
class PublishedBuffer:
    """What was last published for a buffer.

    texts: the URIs of its texts, which are the cells of a notebook, in order.
    dependencies: the paths of the other files that were read for the report.
    """

    buffer: Buffer
    report: FileReport | None
    texts: tuple[str, ...]
    dependencies: frozenset[str] = frozenset()
    findings: tuple[PublishedFinding, ...] = ()
    diagnostics: tuple[types.Diagnostic, ...] = ()


class Session(LanguageServer):
    """The server of one editor. Its methods run in the thread that communicates with the editor; `jobs` runs checks.

    startup_error: an error from before the connection, which is shown once the editor is connected.
    """

    def __init__(self, checker: Checker, jobs: Jobs, startup_error: MpguardError | None = None) -> None:
        super().__init__("mpguard", __version__, notebook_document_sync=_NOTEBOOKS)
        self.checker, self.jobs, self.startup_error = checker, jobs, startup_error
        self.settings: dict[str | None, ClientSettings] = {None: ClientSettings()}
        self.published: dict[str, PublishedBuffer] = {}
        self._scheduled: dict[str, asyncio.Task[None]] = {}
        self._shown_once: set[str] = set()
        self._config_errors: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._client_watches_files = False
        self._last_read = 0.0

    # -- buffers ----------------------------------------------------------------------------------

    def owner(self, uri: str) -> str:
        """Return the URI of the notebook that a cell belongs to; any other URI unchanged."""
        notebook = self.workspace.get_notebook_document(cell_uri=uri)
        return uri if notebook is None else notebook.uri

    def open_buffers(self) -> list[str]:
        """Return the URIs of all open texts and notebooks."""
        notebooks = [each.uri for each in self.workspace.notebook_documents.values()]
        texts = [each.uri for each in self.workspace.text_documents.values()]
        return notebooks + [uri for uri in texts if self.owner(uri) == uri]

    def buffer(self, uri: str) -> tuple[Buffer, tuple[str, ...]] | None:
        """Return the current buffer of a URI and the URIs of its texts; None if it is not open or not checked."""
        if uris.urlparse(uri)[0] not in _SCHEMES:
            return None
        notebook = self.workspace.get_notebook_document(notebook_uri=uri)
        if notebook is not None:
            documents = [self.workspace.get_text_document(cell.document) for cell in notebook.cells]
            cells = tuple(
                (document.source, cell.kind == types.NotebookCellKind.Code and document.language_id == "python")
                for cell, document in zip(notebook.cells, documents, strict=True)
            )
            path, folder, settings = self._locate(uri)
            return Buffer(path, "", "", folder, settings, cells), tuple(each.uri for each in documents)
        open_texts = self.workspace.text_documents.values()
        text = next((each for each in open_texts if each.uri == uri), None)
        if text is None:
            return None
        path, folder, settings = self._locate(uri)
        return Buffer(path, text.language_id or "", text.source, folder, settings), (uri,)

    def _locate(self, uri: str) -> tuple[str, Path, ClientSettings]:
        """Return the path of a URI (for a new document: a possible one), its workspace folder and its settings."""
        path = uris.to_fs_path(uri)
        folders = [(Path(folder), each.uri) for each in self._folders() if (folder := uris.to_fs_path(each.uri))]
        if path is None:
            name = Path(uris.urlparse(uri)[2]).name or "untitled"
            path = str((folders[0][0] if folders else Path.cwd()) / name)
        parents = [pair for pair in folders if Path(path).is_relative_to(pair[0])]
        if not parents:
            return path, Path(path).parent, self.settings[None]
        nearest, key = max(parents, key=lambda pair: len(pair[0].parts))
        return path, nearest, self.settings.get(key, self.settings[None])

    def _folders(self) -> list[types.WorkspaceFolder]:
        folders = list(self.workspace.folders.values())
        root = self.workspace.root_uri
        return folders or ([types.WorkspaceFolder(root, "")] if root else [])

    # -- checking ---------------------------------------------------------------------------------

    def schedule_check(self, uri: str, delay: float = TYPING) -> None:
        """Check a buffer after a delay without further changes. Checks after typing run before other checks."""
        earlier = self._scheduled.pop(uri, None)
        if earlier is not None:
            earlier.cancel()
        self._scheduled[uri] = asyncio.ensure_future(self._check_after(uri, delay))

    def recheck_all(self) -> None:
        """Discard what was read from files, and check all open buffers, as files or settings have changed."""
        self.schedule_check("", SAVING)
        for uri in self.open_buffers():
            self.schedule_check(uri, SAVING)

    async def _check_after(self, uri: str, delay: float) -> None:
        await asyncio.sleep(delay)
        try:
            await (self.check_buffer(uri, delay < SAVING) if uri else self.jobs.submit(self.checker.forget))
        except Exception as error:
            self.show_error(f"a defect of the server: {error!r}", once=repr(error), log=traceback.format_exc())
        self._scheduled.pop(uri, None)

    async def check_buffer(self, uri: str, urgent: bool = True) -> PublishedBuffer | None:
        """Check a buffer and publish the result, unless it is unchanged; return what is published for it.

        Returns None if the buffer is not open, or was changed during the check. urgent: the user is waiting.
        """
        current = self.buffer(uri)
        if current is None:
            return None
        before = self.published.get(uri)
        if before is not None and (before.buffer, before.texts) == current and uri not in self._scheduled:
            return before
        buffer, texts = current
        try:
            await self._forget_if_unwatched()
            check = functools.partial(self.checker.report, buffer, self._unsaved(buffer.path))
            result = await self.jobs.submit(check, urgent)
            self._config_errors.pop(uri, None)
        except ConfigError as error:
            if str(error) not in self._config_errors.values():
                self.show_error(str(error))
            self._config_errors[uri] = str(error)
            result = None
        if self.buffer(uri) != current:
            return None  # the change has scheduled another check
        report, dependencies = (result.report, result.dependencies) if result else (None, frozenset[str]())
        published = self._with_diagnostics(PublishedBuffer(buffer, report, texts, dependencies))
        self._publish(uri, published)
        if not _is_saved(buffer) if before is None else before.buffer.text != buffer.text:
            self._recheck_dependents(buffer.path)
        return published

    def _unsaved(self, path: str) -> dict[str, bytes]:
        """Return the contents of the other open files, by path."""
        documents = self.workspace.text_documents.values()
        texts = {uris.to_fs_path(each.uri): each.source for each in documents if uris.urlparse(each.uri)[0] == "file"}
        return {name: encode(text, name.endswith(PYTHON)) for name, text in texts.items() if name and name != path}

    def _recheck_dependents(self, path: str) -> None:
        """Check the buffers that depend on a changed open file, after all urgent work."""
        dependents = [uri for uri, published in self.published.items() if path in published.dependencies]
        self._in_background(self.jobs.submit(functools.partial(self.checker.file_changed, path)))
        for uri in dependents:
            self.schedule_check(uri, SAVING)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # asyncio itself keeps no reference to a task
        task.add_done_callback(self._tasks.discard)

    async def _forget_if_unwatched(self) -> None:
        """Discard what was read from files every `UNWATCHED` seconds if the editor does not report their changes."""
        now = asyncio.get_running_loop().time()
        if not self._client_watches_files and now > self._last_read + UNWATCHED:
            self._last_read = now
            await self.jobs.submit(self.checker.forget)

    def _with_diagnostics(self, published: PublishedBuffer) -> PublishedBuffer:
        """Add the findings of the report and their diagnostics. Defects of rules are shown as errors."""
        findings, diagnostics = [], []
        for finding in published.report.findings if published.report else ():
            index = (finding.cell or 1) - 1
            mapper = self._mapper(published, index)
            marked = mapper.range((finding.line, finding.column), (finding.end_line, finding.end_column))
            findings.append(PublishedFinding(published.texts[index], marked, finding))
            locate = functools.partial(self._location, published, finding)
            diagnostics.append(to_lsp.diagnostic(findings[-1], mapper, locate))
        for defect in published.report.defects if published.report else ():
            self.show_error(str(defect), once=f"{defect.code} {defect.error}", log=defect.traceback)
        return dataclasses.replace(published, findings=tuple(findings), diagnostics=tuple(diagnostics))

    def _location(self, published: PublishedBuffer, finding: Finding, note: PlacedNote) -> types.Location | None:
        """Return the location of a note in another file, or in another cell of the same notebook."""
        path, separator, cell = (note.path or "").rpartition(":cell ")
        if separator and path == finding.path and note.start and note.end:
            index = int(cell) - 1
            return types.Location(published.texts[index], self._mapper(published, index).range(note.start, note.end))
        return to_lsp.location(note, lambda line: PositionMapper(Lines(line), self.workspace.position_codec))

    def _mapper(self, published: PublishedBuffer, index: int) -> PositionMapper:
        cells = published.buffer.cells
        if cells is not None:
            return PositionMapper(_lines(cells[index][0]), self.workspace.position_codec)
        text = published.buffer.text.removeprefix(BOM)
        bom = BOM if text != published.buffer.text else ""
        return PositionMapper(_lines(text), self.workspace.position_codec, bom)

    def _publish(self, uri: str, published: PublishedBuffer) -> None:
        before = self.published.get(uri)
        self.published[uri] = published
        pairs = list(zip(published.diagnostics, published.findings, strict=True))
        for text in dict.fromkeys((*published.texts, *(before.texts if before else ()))):
            diagnostics = [diagnostic for diagnostic, finding in pairs if finding.uri == text]
            version = self.workspace.get_text_document(text).version if text in published.texts else None
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(text, diagnostics, version))

    def close_buffer(self, uri: str) -> None:
        """Remove the diagnostics of a buffer that was closed, and cancel its check."""
        scheduled = self._scheduled.pop(uri, None)
        if scheduled is not None:
            scheduled.cancel()
        published = self.published.pop(uri, None)
        if published is not None and not _is_saved(published.buffer):
            self._recheck_dependents(published.buffer.path)  # the content on disk counts from now on
        for text in published.texts if published else ():
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(text, []))

    # -- actions ----------------------------------------------------------------------------------

    async def change(
        self, uri: str, published: PublishedBuffer, action: Action, target: PublishedFinding | None
    ) -> types.WorkspaceEdit | str:
        """Return the edit of an action, or the reason why it cannot be done. target: the finding of the action."""
        finding = target.finding if target else None
        try:
            result = await self.jobs.submit(functools.partial(self.checker.change, published.buffer, action, finding))
        except ConfigError as error:
            result = BufferChange(problem=str(error))
        if result.problem:
            return result.problem
        if self.buffer(uri) != (published.buffer, published.texts):
            return "the text has changed since"
        edits: dict[str, list[types.TextEdit]] = {}
        for index, (text, after) in enumerate(zip(published.texts, result.texts, strict=True)):
            of_text = self._mapper(published, index).edits(after)
            if of_text:
                edits[text] = of_text
        capability = self.client_capabilities.workspace and self.client_capabilities.workspace.workspace_edit
        if not (capability and capability.document_changes):
            return types.WorkspaceEdit(changes=dict(edits))
        versions = {text: self.workspace.get_text_document(text).version for text in edits}
        return types.WorkspaceEdit(
            document_changes=[
                types.TextDocumentEdit(types.OptionalVersionedTextDocumentIdentifier(text, versions[text]), list(each))
                for text, each in edits.items()
            ]
        )

    # -- settings ---------------------------------------------------------------------------------

    def set_settings(self, given: object, folder: str | None = None) -> None:
        """Store the editor's settings for a workspace folder, or for all (None). Invalid ones are shown as errors."""
        try:
            self.settings[folder] = client_settings.read(given)
        except MpguardError as error:
            self.show_error(str(error))

    async def request_settings(self) -> None:
        """Request the settings from the editor, if it supports that, and check all open buffers."""
        capability = self.client_capabilities.workspace
        if capability is None or not capability.configuration:
            return
        folders = [each.uri for each in self._folders()]
        items = [types.ConfigurationItem(scope, client_settings.SECTION) for scope in (None, *folders)]
        given = await self.workspace_configuration_async(types.ConfigurationParams(items))
        for folder, each in zip((None, *folders), given, strict=False):
            if each is not None:
                self.set_settings(each, folder)
            elif folder is not None:
                self.settings.pop(folder, None)
        self.recheck_all()

    async def register_watchers(self) -> None:
        """Request notifications for changes of settings and of files that findings may depend on, if supported."""
        capability = self.client_capabilities.workspace
        settings = capability.did_change_configuration if capability else None
        watched = capability.did_change_watched_files if capability else None
        registrations: list[types.Registration] = []
        if settings and settings.dynamic_registration:
            section = types.DidChangeConfigurationRegistrationOptions(client_settings.SECTION)
            registrations.append(
                types.Registration("mpguard-settings", types.WORKSPACE_DID_CHANGE_CONFIGURATION, section)
            )
        self._client_watches_files = bool(watched and watched.dynamic_registration)
        if self._client_watches_files:
            watchers: list[Any] = [types.FileSystemWatcher(pattern) for pattern in _WATCHED]
            files = types.DidChangeWatchedFilesRegistrationOptions(watchers)
            registrations.append(types.Registration("mpguard-files", types.WORKSPACE_DID_CHANGE_WATCHED_FILES, files))
        if registrations:
            await self.client_register_capability_async(types.RegistrationParams(registrations))

    # -- messages ---------------------------------------------------------------------------------

    def show_error(self, message: str, once: str = "", log: str = "") -> None:
        """Show an error to the user. once: a key under which it is shown only once. log: text for the editor's log."""
        if once and once in self._shown_once:
            return
        self._shown_once.add(once)
        self.window_show_message(types.ShowMessageParams(types.MessageType.Error, f"mpguard: {message}"))
        if log:
            self.window_log_message(types.LogMessageParams(types.MessageType.Error, log))

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Report an error inside pygls; errors of requests are sent as responses already."""
        with contextlib.suppress(Exception):
            super().report_server_error(error, source)


def _is_saved(buffer: Buffer) -> bool:
    try:
        return Path(buffer.path).read_bytes() == encode(buffer.text)
    except OSError:
        return False


@functools.lru_cache(16)
def _lines(text: str) -> Lines:
    """Return the lines of a text; cached, because all findings of a text need them."""
    return Lines(text)
