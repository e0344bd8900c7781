"""Handlers for the messages of the protocol that the server accepts."""

from __future__ import annotations

from typing import Any

from lsprotocol import types

from mpguard.lint.run.adoption import noqa
from mpguard.server import to_lsp
from mpguard.server.checker import Action
from mpguard.server.positions import Buffers
from mpguard.server.session import PublishedBuffer, Session
from mpguard.server.to_lsp import FIX_ALL, PublishedFinding

__all__ = ["register"]

_QUICK = types.CodeActionKind.QuickFix.value


def register(server: Session) -> None:
    """Register all handlers. Their first parameter must be named `ls`: then pygls passes the server."""
    _lifecycle(server)
    _texts(server)
    _notebooks(server)
    _requests(server)


def _lifecycle(server: Session) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(ls: Session, params: types.InitializeParams) -> None:
        ls.protocol._workspace = Buffers.of(ls.workspace)
        ls.set_settings(params.initialization_options)

    @server.feature(types.INITIALIZED)
    async def initialized(ls: Session, _: types.InitializedParams) -> None:
        if ls.startup_error is not None:
            ls.show_error(str(ls.startup_error))
        await ls.register_watchers()
        await ls.request_settings()

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def configured(ls: Session, params: types.DidChangeConfigurationParams) -> None:
        if params.settings:
            ls.set_settings(params.settings)
        await ls.request_settings()
        ls.recheck_all()

    @server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    async def folders(ls: Session, _: types.DidChangeWorkspaceFoldersParams) -> None:
        await ls.request_settings()
        ls.recheck_all()

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def files(ls: Session, _: types.DidChangeWatchedFilesParams) -> None:
        ls.recheck_all()


def _texts(server: Session) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(ls: Session, params: types.DidOpenTextDocumentParams) -> None:
        ls.schedule_check(params.text_document.uri, 0)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(ls: Session, params: types.DidChangeTextDocumentParams) -> None:
        ls.schedule_check(ls.owner(params.text_document.uri))

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(ls: Session, _: types.DidSaveTextDocumentParams) -> None:
        ls.recheck_all()

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(ls: Session, params: types.DidCloseTextDocumentParams) -> None:
        ls.close_buffer(params.text_document.uri)


def _notebooks(server: Session) -> None:
    @server.feature(types.NOTEBOOK_DOCUMENT_DID_OPEN)
    def opened(ls: Session, params: types.DidOpenNotebookDocumentParams) -> None:
        ls.schedule_check(params.notebook_document.uri, 0)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CHANGE)
    def changed(ls: Session, params: types.DidChangeNotebookDocumentParams) -> None:
        ls.schedule_check(params.notebook_document.uri)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_SAVE)
    def saved(ls: Session, _: types.DidSaveNotebookDocumentParams) -> None:
        ls.recheck_all()

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CLOSE)
    def closed(ls: Session, params: types.DidCloseNotebookDocumentParams) -> None:
        ls.close_buffer(params.notebook_document.uri)


def _requests(server: Session) -> None:
    @server.feature(types.TEXT_DOCUMENT_HOVER)
    async def hover(ls: Session, params: types.HoverParams) -> types.Hover | None:
        at = types.Range(params.position, params.position)
        published = await ls.check_buffer(ls.owner(params.text_document.uri))
        findings = [each for _, each in _findings_at(published, params.text_document.uri, at)]
        capability = ls.client_capabilities.text_document and ls.client_capabilities.text_document.hover
        formats = capability.content_format if capability else None
        return to_lsp.hover(findings, ls.checker.rules, formats is None or types.MarkupKind.Markdown in formats)

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions([types.CodeActionKind.QuickFix, FIX_ALL], resolve_provider=True),
    )
    async def actions(ls: Session, params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = ls.owner(params.text_document.uri)
        published = await ls.check_buffer(uri)
        if published is None:
            return []
        findings = _findings_at(published, params.text_document.uri, params.range)
        actions = _actions(published, findings, params.context.only)
        for each in actions:
            data: Any = each.data
            data.update(uri=uri, of=str(hash(published.buffer)))
        if _client_resolves_edits(ls):
            return actions
        return [each for each in actions if not await _resolve(ls, each)]

    @server.feature(types.CODE_ACTION_RESOLVE)
    async def resolve(ls: Session, action: types.CodeAction) -> types.CodeAction:
        problem = await _resolve(ls, action)
        if problem:
            ls.show_error(f"{action.title}: not done: {problem}")
        return action


def _findings_at(published: PublishedBuffer | None, text: str, at: types.Range) -> list[tuple[int, PublishedFinding]]:
    findings = enumerate(published.findings) if published else ()
    return [(index, each) for index, each in findings if each.uri == text and each.overlaps(at)]


def _actions(
    published: PublishedBuffer, findings: list[tuple[int, PublishedFinding]], only: Any
) -> list[types.CodeAction]:
    """Return the actions without their edits. The data of an action has what `_resolve` needs."""
    actions: list[types.CodeAction] = []
    target = published.report.target if published.report else None
    if to_lsp.is_requested(_QUICK, only) and target is not None:
        for index, each in findings:
            finding, diagnostics = each.finding, [published.diagnostics[index]]
            if finding.fix is not None:
                safe = finding.fix.applicability == "safe"
                title = f"{finding.fix.title} ({finding.code}{'' if safe else ', unsafe: review the result'})"
                data = {"action": "fix", "finding": index}
                kind = types.CodeActionKind.QuickFix
                actions.append(types.CodeAction(title, kind, diagnostics, safe or None, data=data))
            if noqa.has_comment(finding.code, target):
                title = f"Suppress {finding.code} here (# noqa)"
                data = {"action": "suppress", "finding": index}
                actions.append(types.CodeAction(title, types.CodeActionKind.QuickFix, diagnostics, data=data))
    fixes = [each.finding.fix for each in published.findings]
    if any(fix and fix.applicability == "safe" for fix in fixes) and to_lsp.is_requested(FIX_ALL, only):
        data = {"action": "fix-all", "finding": None}
        actions.append(types.CodeAction("Apply all safe fixes of mpguard", FIX_ALL, data=data))
    return actions


async def _resolve(ls: Session, action: types.CodeAction) -> str:
    """Set the edit of an action; return the reason if the action cannot be done, else an empty string."""
    data: Any = action.data
    published = ls.published.get(data["uri"])
    if published is None or str(hash(published.buffer)) != data["of"]:
        return "the text has changed since"
    kind: Action = data["action"]
    finding = None if data["finding"] is None else published.findings[data["finding"]]
    edit = await ls.change(data["uri"], published, kind, finding)
    if isinstance(edit, str):
        return edit
    action.edit = edit
    return ""


def _client_resolves_edits(ls: Session) -> bool:
    """True if the editor requests the edit of an action only when the user chooses it."""
    capability = ls.client_capabilities.text_document and ls.client_capabilities.text_document.code_action
    resolve = capability.resolve_support if capability and capability.data_support else None
    return resolve is not None and "edit" in resolve.properties
