"""What the editor may ask, and tell: each message of the protocol that the server takes."""

from __future__ import annotations

from typing import Any

from lsprotocol import types

from mpguard.lint.run.adoption import noqa
from mpguard.server import to_lsp
from mpguard.server.checker import Action
from mpguard.server.positions import Buffers
from mpguard.server.session import Answer, Session
from mpguard.server.to_lsp import FIX_ALL, PublishedFinding

__all__ = ["register"]

_QUICK = types.CodeActionKind.QuickFix.value


def register(server: Session) -> None:
    """Makes a server answer. The functions are called `ls` first, as pygls hands itself over."""
    _lifecycle(server)
    _texts(server)
    _notebooks(server)
    _questions(server)


def _lifecycle(server: Session) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(ls: Session, params: types.InitializeParams) -> None:
        ls.protocol._workspace = Buffers.of(ls.workspace)
        ls.wish(params.initialization_options)

    @server.feature(types.INITIALIZED)
    async def initialized(ls: Session, _: types.InitializedParams) -> None:
        if ls.trouble is not None:
            ls.say(str(ls.trouble))
        await ls.be_told()
        await ls.ask_for_wishes()

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def configured(ls: Session, params: types.DidChangeConfigurationParams) -> None:
        if params.settings:
            ls.wish(params.settings)
        await ls.ask_for_wishes()
        ls.recheck_all()

    @server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    async def folders(ls: Session, _: types.DidChangeWorkspaceFoldersParams) -> None:
        await ls.ask_for_wishes()
        ls.recheck_all()

    @server.feature(types.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def files(ls: Session, _: types.DidChangeWatchedFilesParams) -> None:
        ls.recheck_all()


def _texts(server: Session) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(ls: Session, params: types.DidOpenTextDocumentParams) -> None:
        ls.soon(params.text_document.uri, 0)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(ls: Session, params: types.DidChangeTextDocumentParams) -> None:
        ls.soon(ls.owner(params.text_document.uri))

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(ls: Session, _: types.DidSaveTextDocumentParams) -> None:
        ls.recheck_all()

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(ls: Session, params: types.DidCloseTextDocumentParams) -> None:
        ls.closed(params.text_document.uri)


def _notebooks(server: Session) -> None:
    @server.feature(types.NOTEBOOK_DOCUMENT_DID_OPEN)
    def opened(ls: Session, params: types.DidOpenNotebookDocumentParams) -> None:
        ls.soon(params.notebook_document.uri, 0)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CHANGE)
    def changed(ls: Session, params: types.DidChangeNotebookDocumentParams) -> None:
        ls.soon(params.notebook_document.uri)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_SAVE)
    def saved(ls: Session, _: types.DidSaveNotebookDocumentParams) -> None:
        ls.recheck_all()

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CLOSE)
    def closed(ls: Session, params: types.DidCloseNotebookDocumentParams) -> None:
        ls.closed(params.notebook_document.uri)


def _questions(server: Session) -> None:
    @server.feature(types.TEXT_DOCUMENT_HOVER)
    async def hover(ls: Session, params: types.HoverParams) -> types.Hover | None:
        at = types.Range(params.position, params.position)
        answer = await ls.checked(ls.owner(params.text_document.uri))
        touched = [each for _, each in _touched(answer, params.text_document.uri, at)]
        able = ls.client_capabilities.text_document and ls.client_capabilities.text_document.hover
        formats = able.content_format if able else None
        return to_lsp.page(touched, ls.checker.rules, formats is None or types.MarkupKind.Markdown in formats)

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions([types.CodeActionKind.QuickFix, FIX_ALL], resolve_provider=True),
    )
    async def actions(ls: Session, params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = ls.owner(params.text_document.uri)
        answer = await ls.checked(uri)
        if answer is None:
            return []
        touched = _touched(answer, params.text_document.uri, params.range)
        made = _actions(answer, touched, params.context.only)
        for each in made:
            data: Any = each.data
            data.update(uri=uri, of=str(hash(answer.buffer)))
        if _resolves(ls):
            return made
        done = []
        for each in made:
            if not await _resolved(ls, each):
                done.append(each)
        return done

    @server.feature(types.CODE_ACTION_RESOLVE)
    async def resolve(ls: Session, action: types.CodeAction) -> types.CodeAction:
        problem = await _resolved(ls, action)
        if problem:
            ls.say(f"{action.title}: not done: {problem}")
        return action


def _touched(answer: Answer | None, text: str, at: types.Range) -> list[tuple[int, PublishedFinding]]:
    found = enumerate(answer.shown) if answer else ()
    return [(index, each) for index, each in found if each.uri == text and each.touches(at)]


def _actions(answer: Answer, touched: list[tuple[int, PublishedFinding]], only: Any) -> list[types.CodeAction]:
    """The actions without what they change. data: what `_resolved` needs."""
    made: list[types.CodeAction] = []
    target = answer.report.target if answer.report else None
    if to_lsp.wanted(_QUICK, only) and target is not None:
        for index, shown in touched:
            finding, said = shown.finding, [answer.diagnostics[index]]
            if finding.fix is not None:
                safe = finding.fix.applicability == "safe"
                title = f"{finding.fix.title} ({finding.code}{'' if safe else ', unsafe: look at what it does'})"
                data = {"action": "fix", "finding": index}
                made.append(types.CodeAction(title, types.CodeActionKind.QuickFix, said, safe or None, data=data))
            if noqa.has_comment(finding.code, target):
                title = f"Suppress {finding.code} here (# noqa)"
                data = {"action": "suppress", "finding": index}
                made.append(types.CodeAction(title, types.CodeActionKind.QuickFix, said, data=data))
    safe_ones = [each for each in answer.shown if each.finding.fix and each.finding.fix.applicability == "safe"]
    if safe_ones and to_lsp.wanted(FIX_ALL, only):
        data = {"action": "fix-all", "finding": None}
        made.append(types.CodeAction("Fix all that mpguard can fix safely", FIX_ALL, data=data))
    return made


async def _resolved(ls: Session, action: types.CodeAction) -> str:
    """Says in an action what it changes; or returns why it cannot be done."""
    data: Any = action.data
    answer = ls.answers.get(data["uri"])
    if answer is None or str(hash(answer.buffer)) != data["of"]:
        return "the text has changed in the meantime"
    what: Action = data["action"]
    shown = None if data["finding"] is None else answer.shown[data["finding"]]
    changed = await ls.change(data["uri"], answer, what, shown)
    if isinstance(changed, str):
        return changed
    action.edit = changed
    return ""


def _resolves(ls: Session) -> bool:
    """Whether the editor asks for what an action changes when it is chosen, and not before."""
    able = ls.client_capabilities.text_document and ls.client_capabilities.text_document.code_action
    return bool(able and able.data_support and able.resolve_support and "edit" in able.resolve_support.properties)
