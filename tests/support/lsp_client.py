"""An editor: a real client of the language server, which it starts as editors do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.lsp.client import LanguageClient

PATIENCE = 60


class Editor(LanguageClient):
    """settings: what it answers when it is asked for them, by folder (None: without one)."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.settings: dict[str | None, Any] = {}
        self.published: dict[str, types.PublishDiagnosticsParams] = {}
        self.texts: dict[str, str] = {}
        self.messages: list[str] = []
        self.watchers: list[str] = []
        self.registered: list[str] = []
        self._news = asyncio.Event()
        self._register()

    def _register(self) -> None:
        @self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params: types.PublishDiagnosticsParams) -> None:
            self.published[params.uri] = params
            self._news.set()

        @self.feature(types.WINDOW_SHOW_MESSAGE)
        def said(params: types.ShowMessageParams) -> None:
            self.messages.append(params.message)
            self._news.set()

        @self.feature(types.WINDOW_LOG_MESSAGE)
        def logged(_: types.LogMessageParams) -> None: ...

        @self.feature(types.WORKSPACE_CONFIGURATION)
        def configuration(params: types.ConfigurationParams) -> list[Any]:
            assert all(item.section == "mpguard" for item in params.items)
            return [self.settings.get(item.scope_uri) for item in params.items]

        @self.feature(types.CLIENT_REGISTER_CAPABILITY)
        def register(params: types.RegistrationParams) -> None:
            for registration in params.registrations:
                options: Any = registration.register_options
                self.watchers += [each["globPattern"] for each in options.get("watchers", ())]
                self.registered.append(registration.method)
            self._news.set()

    async def until(self, holds: Callable[[], Any], what: str = "") -> None:
        """Waits for the server's next messages until something holds."""

        async def wait() -> None:
            while not holds():
                self._news.clear()
                await self._news.wait()

        try:
            await asyncio.wait_for(wait(), PATIENCE)
        except asyncio.TimeoutError:
            raise AssertionError(f"{what or 'it'} never came: {self.published} {self.messages}") from None

    # -- what a user does -------------------------------------------------------------------------

    async def open(self, uri: str, text: str, language: str = "python") -> list[types.Diagnostic]:
        """Opens a text, and returns what is said about it."""
        self.texts[uri] = text
        item = types.TextDocumentItem(uri, language, 1, text)
        self.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return await self.said(uri, 1)

    async def write(self, uri: str, text: str, version: int) -> list[types.Diagnostic]:
        """Puts another text in its place."""
        self.texts[uri] = text
        whole = types.TextDocumentContentChangeWholeDocument(text)
        return await self.change(uri, version, whole)

    async def change(self, uri: str, version: int, *changes: Any) -> list[types.Diagnostic]:
        identifier = types.VersionedTextDocumentIdentifier(version, uri)
        self.text_document_did_change(types.DidChangeTextDocumentParams(identifier, list(changes)))
        return await self.said(uri, version)

    async def said(self, uri: str, version: int) -> list[types.Diagnostic]:
        """What is said about one version of a text."""
        await self.until(lambda: uri in self.published and self.published[uri].version == version, f"{uri} {version}")
        return list(self.published[uri].diagnostics)

    async def again(self, uri: str) -> list[types.Diagnostic]:
        """What is said next about a text."""
        before = self.published.pop(uri, None)
        assert before is not None
        await self.until(lambda: uri in self.published, uri)
        return list(self.published[uri].diagnostics)

    async def actions(
        self, uri: str, at: types.Range, only: list[str] | None = None, resolve: bool = False
    ) -> dict[str, types.CodeAction]:
        context = types.CodeActionContext([], only)  # type: ignore[arg-type]
        params = types.CodeActionParams(types.TextDocumentIdentifier(uri), at, context)
        found = await self.text_document_code_action_async(params) or []
        actions = [each for each in found if isinstance(each, types.CodeAction)]
        if resolve:
            assert all(each.edit is None for each in actions)
            actions = [await self.code_action_resolve_async(each) for each in actions]
        return {each.title: each for each in actions}

    async def hover(self, uri: str, line: int, character: int) -> str | None:
        at = types.HoverParams(types.TextDocumentIdentifier(uri), types.Position(line, character))
        found = await self.text_document_hover_async(at)
        return None if found is None else found.contents.value  # type: ignore[union-attr]

    def files_changed(self, *files: Path) -> None:
        changes = [types.FileEvent(file.as_uri(), types.FileChangeType.Changed) for file in files]
        self.workspace_did_change_watched_files(types.DidChangeWatchedFilesParams(changes))

    async def leave(self) -> int:
        """Ends the session as the protocol has it; returns the server's exit status."""
        await asyncio.wait_for(self.shutdown_async(None), PATIENCE)
        self.exit(None)
        return await self.status()

    async def status(self) -> int:
        assert self._server is not None
        return await asyncio.wait_for(self._server.wait(), PATIENCE)


#: What most editors of today can do.
MODERN: Mapping[str, Any] = {
    "workspace": types.WorkspaceClientCapabilities(
        configuration=True,
        did_change_configuration=types.DidChangeConfigurationClientCapabilities(dynamic_registration=True),
        workspace_edit=types.WorkspaceEditClientCapabilities(document_changes=True),
        did_change_watched_files=types.DidChangeWatchedFilesClientCapabilities(dynamic_registration=True),
    ),
    "text_document": types.TextDocumentClientCapabilities(
        code_action=types.CodeActionClientCapabilities(
            data_support=True, resolve_support=types.ClientCodeActionResolveOptions(["edit"])
        )
    ),
    "notebook_document": types.NotebookDocumentClientCapabilities(types.NotebookDocumentSyncClientCapabilities()),
}


@contextlib.asynccontextmanager
async def editor(
    *folders: Path,
    able: Mapping[str, Any] = MODERN,
    settings: Mapping[str | None, Any] | None = None,
    options: Any = None,
    arguments: tuple[str, ...] = (),
    command: tuple[str, ...] = (sys.executable, "-m", "mpguard", "server"),
    **environment: str,
) -> AsyncIterator[Editor]:
    """An editor on some workspace folders, with the server running; leaves as editors do, where the test has not."""
    made = Editor()
    made.settings = dict(settings or {})
    await made.start_io(*command, *arguments, env={**os.environ, **environment}, cwd=folders[0] if folders else None)
    opened = [types.WorkspaceFolder(each.as_uri(), each.name) for each in folders]
    capabilities = types.ClientCapabilities(**able)
    root = folders[0].as_uri() if folders else None
    params = types.InitializeParams(
        capabilities, root_uri=root, workspace_folders=opened or None, initialization_options=options
    )
    await asyncio.wait_for(made.initialize_async(params), PATIENCE)
    made.initialized(types.InitializedParams())
    try:
        yield made
        server = made._server
        if server is not None and server.returncode is None:
            assert await made.leave() == 0, (await server.stderr.read()).decode() if server.stderr else ""
    finally:
        server = made._server
        if server is not None and server.returncode is None:
            server.kill()
        await made.stop()


def marked(text: str, at: types.Range) -> str:
    """What a range covers of a text, as an editor that counts in UTF-16 sees it; lines end as the protocol says."""
    return text[slice(*offsets(text, at))]


def offsets(text: str, at: types.Range) -> tuple[int, int]:
    return _offset(text, at.start), _offset(text, at.end)


def _offset(text: str, at: types.Position) -> int:
    start = 0
    for _ in range(at.line):
        ends = [(text.find(end, start), len(end)) for end in ("\r\n", "\n", "\r")]
        place, length = min((pair for pair in ends if pair[0] >= 0), key=lambda pair: (pair[0], -pair[1]))
        start = place + length
    return start + len(text[start:].encode("utf-16-le")[: 2 * at.character].decode("utf-16-le"))


def applied(texts: Mapping[str, str], edit: types.WorkspaceEdit | None) -> dict[str, str]:
    """The texts after an edit."""
    assert edit is not None
    changes: dict[str, Any] = dict(edit.changes or {})
    for each in edit.document_changes or ():
        assert isinstance(each, types.TextDocumentEdit)
        changes[each.text_document.uri] = each.edits
    after = dict(texts)
    for uri, edits in changes.items():
        for each in sorted(edits, key=lambda e: (e.range.start.line, e.range.start.character), reverse=True):
            start, end = offsets(after[uri], each.range)
            after[uri] = after[uri][:start] + each.new_text + after[uri][end:]
    return after
