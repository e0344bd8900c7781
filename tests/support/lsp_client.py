"""A client of the language server that starts it and communicates with it as an editor does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from limits import seconds
from lsprotocol import types
from pygls.lsp.client import LanguageClient

TIMEOUT = seconds(60)


class Editor(LanguageClient):
    """A client that records what the server sends. settings: its settings by folder (None: for all folders)."""

    def __init__(self) -> None:
        super().__init__("editor", "1")
        self.settings: dict[str | None, Any] = {}
        self.published: dict[str, types.PublishDiagnosticsParams] = {}
        self.texts: dict[str, str] = {}
        self.messages: list[str] = []
        self.watchers: list[str] = []
        self.registered: list[str] = []
        self._received = asyncio.Event()
        self._register()

    def _register(self) -> None:
        @self.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params: types.PublishDiagnosticsParams) -> None:
            self.published[params.uri] = params
            self._received.set()

        @self.feature(types.WINDOW_SHOW_MESSAGE)
        def message_shown(params: types.ShowMessageParams) -> None:
            self.messages.append(params.message)
            self._received.set()

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
            self._received.set()

    async def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Wait for messages of the server until a condition is true."""

        async def wait() -> None:
            while not condition():
                self._received.clear()
                await self._received.wait()

        try:
            await asyncio.wait_for(wait(), TIMEOUT)
        except asyncio.TimeoutError:
            raise AssertionError(
                f"{what or 'the condition'} was never true: {self.published} {self.messages}"
            ) from None

    # -- actions of the user -----------------------------------------------------------------------

    async def open(self, uri: str, text: str, language: str = "python") -> list[types.Diagnostic]:
        """Open a text, and return its diagnostics."""
        self.texts[uri] = text
        item = types.TextDocumentItem(uri, language, 1, text)
        self.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return await self.diagnostics(uri, 1)

    async def write(self, uri: str, text: str, version: int) -> list[types.Diagnostic]:
        """Replace the whole text."""
        self.texts[uri] = text
        whole = types.TextDocumentContentChangeWholeDocument(text)
        return await self.change(uri, version, whole)

    async def change(self, uri: str, version: int, *changes: Any) -> list[types.Diagnostic]:
        identifier = types.VersionedTextDocumentIdentifier(version, uri)
        self.text_document_did_change(types.DidChangeTextDocumentParams(identifier, list(changes)))
        return await self.diagnostics(uri, version)

    async def diagnostics(self, uri: str, version: int) -> list[types.Diagnostic]:
        """Return the diagnostics of one version of a text."""
        await self.until(lambda: uri in self.published and self.published[uri].version == version, f"{uri} {version}")
        return list(self.published[uri].diagnostics)

    async def next_diagnostics(self, uri: str) -> list[types.Diagnostic]:
        """Return the next diagnostics of a text."""
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
        """End the session with `shutdown` and `exit`, and return the exit status of the server."""
        await asyncio.wait_for(self.shutdown_async(None), TIMEOUT)
        self.exit(None)
        return await self.status()

    async def status(self) -> int:
        assert self._server is not None
        return await asyncio.wait_for(self._server.wait(), TIMEOUT)


#: The capabilities of most current editors.
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
    capabilities: Mapping[str, Any] = MODERN,
    settings: Mapping[str | None, Any] | None = None,
    options: Any = None,
    arguments: tuple[str, ...] = (),
    command: tuple[str, ...] = (sys.executable, "-m", "mpguard", "server"),
    **environment: str,
) -> AsyncIterator[Editor]:
    """Start a client on some workspace folders; at the end, shut the server down unless the test has done so."""
    client = Editor()
    client.settings = dict(settings or {})
    await client.start_io(*command, *arguments, env={**os.environ, **environment}, cwd=folders[0] if folders else None)
    opened = [types.WorkspaceFolder(each.as_uri(), each.name) for each in folders]
    client_capabilities = types.ClientCapabilities(**capabilities)
    root = folders[0].as_uri() if folders else None
    params = types.InitializeParams(
        client_capabilities, root_uri=root, workspace_folders=opened or None, initialization_options=options
    )
    await asyncio.wait_for(client.initialize_async(params), TIMEOUT)
    client.initialized(types.InitializedParams())
    try:
        yield client
        server = client._server
        if server is not None and server.returncode is None:
            assert await client.leave() == 0, (await server.stderr.read()).decode() if server.stderr else ""
    finally:
        server = client._server
        if server is not None and server.returncode is None:
            server.kill()
        await client.stop()


def marked(text: str, at: types.Range) -> str:
    """Return the part of a text that a range covers, in UTF-16 units and with the line ends of the protocol."""
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
    """Return the texts after an edit."""
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
