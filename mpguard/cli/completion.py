"""Prints a script that completes mpguard's commands, options and codes in a shell.

mpguard completion bash > ~/.local/share/bash-completion/completions/mpguard
mpguard completion zsh >> ~/.zshrc
"""

from __future__ import annotations

import argparse
import importlib
import shlex

_SCRIPT = """\
_mpguard() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "${{COMP_WORDS[1]}} $before $word" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mpguard mpguard
"""
_CODES = ("--select", "--extend-select", "--ignore")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=("bash",), default="bash", help="default, and the only one: bash")


def run(_: argparse.Namespace) -> int:
    from mpguard.cli import COMMANDS

    cases = [case for command in COMMANDS for case in _cases(command)]
    print(_SCRIPT.format(commands=shlex.quote(" ".join(COMMANDS)), cases="\n".join(cases)), end="")
    return 0


def _cases(command: str) -> list[str]:
    """What completes an option's value; then the options; then what stands without one. Else it is a file."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(f"mpguard.cli.{command}").configure(parser)
    values: list[str] = []
    free: list[str] = []
    names: list[str] = []
    for action in parser._actions:
        names += action.option_strings
        words = _words(command, action)
        if words and action.option_strings:
            values += [_case(f"'{command} {option} '*", words) for option in action.option_strings]
        elif words:
            free.append(_case(f"'{command} '*", words))
    return [*values, _case(f"'{command} '*' -'*", names), *free]


def _words(command: str, action: argparse.Action) -> list[str]:
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if isinstance(action.metavar, str) and "|" in action.metavar:
        return action.metavar.split("|")
    if (action.dest == "code" and command == "rule") or set(_CODES) & set(action.option_strings):
        from mpguard.lint.rule import rules

        return list(rules())
    return []


def _case(pattern: str, words: list[str]) -> str:
    return f"            {pattern}) words={shlex.quote(' '.join(words))} ;;"
