"""`allranks completion bash|zsh|fish`: a script that completes commands, flags, files and names of jobs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from allranks.cli import COMMANDS, make_parser
from allranks.model.options import argument, option

SHELLS = ("bash", "zsh", "fish")
JOBS = ("status", "top", "page")  # commands that take the name of a job


@dataclass(frozen=True)
class CompletionFlags:
    shell: str | None = argument(None, "the shell that will read it", choices=SHELLS)
    jobs: bool = option(False, "print the names of the jobs on this node instead")


FLAGS = (CompletionFlags,)


def main(args: argparse.Namespace) -> int:
    """0 printed, 2 no shell named."""
    from allranks.errors import InputError

    if args.jobs:
        from allranks.incidents.job_overview import recorded_jobs

        for name in dict.fromkeys(folder.name for folder in recorded_jobs()):
            print(name)
        return 0
    if args.shell is None:
        raise InputError("which shell?", hint="allranks completion bash|zsh|fish")
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](), end="")
    return 0


def _flags() -> dict[str, list[tuple[str, str]]]:
    """command -> (word, help) of its flags and actions."""
    found = {}
    for name in COMMANDS:
        parser = make_parser(name, alone=True)
        (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        words = []
        for action in commands.choices[name]._actions:
            text = "" if action.help is None else action.help.partition("\n")[0].replace("%", "")
            words += [(flag, text) for flag in action.option_strings if flag.startswith("--")]
            if not action.option_strings and action.choices:
                words += [(str(choice), "") for choice in action.choices]
        found[name] = words
    return found


def _bash() -> str:
    flags = _flags()
    cases = "\n".join(
        f"    {name}) words={' '.join(word for word, _ in words)!r} ;;" for name, words in flags.items()
    )
    return f"""# bash completion of allranks
_allranks() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=""
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W {" ".join(flags)!r} -- "$current"))
    return
  fi
  case $command in
{cases}
  esac
  if [[ $current != -* && " {" ".join(JOBS)} " == *" $command "* ]]; then words="$(allranks completion --jobs 2>/dev/null)"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current") $([[ $current != -* ]] && compgen -f -- "$current"))
}}
complete -o filenames -F _allranks allranks
"""


def _zsh() -> str:
    commands = "\n".join(f"    {_zsh_word(name, text)}" for name, (_, text) in COMMANDS.items())
    cases = []
    for name, words in _flags().items():
        lines = "\n".join(f"        {_zsh_word(word, text)}" for word, text in words)
        cases.append(f"    {name})\n      words_of=(\n{lines}\n      ) ;;")
    body = "\n".join(cases)
    return f"""#compdef allranks
# zsh completion of allranks
_allranks() {{
  local -a commands words_of
  commands=(
{commands}
  )
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case $words[2] in
{body}
  esac
  if [[ $words[CURRENT] == -* ]]; then _describe flag words_of; return; fi
  case $words[2] in
    {"|".join(JOBS)}) compadd -- ${{(f)"$(allranks completion --jobs 2>/dev/null)"}} ;;
  esac
  _describe word words_of
  _files
}}
compdef _allranks allranks
"""


def _zsh_word(word: str, text: str) -> str:
    return "'" + f"{word}:{text}".replace("'", "'\\''").replace("\n", " ") + "'"


def _fish() -> str:
    lines = ["# fish completion of allranks"]
    for name, (_, text) in COMMANDS.items():
        lines.append(f"complete -c allranks -n __fish_use_subcommand -f -a {name} -d {_fish_text(text)}")
    for name, words in _flags().items():
        on = f"complete -c allranks -n '__fish_seen_subcommand_from {name}'"
        for word, text in words:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"{on} {kind} -d {_fish_text(text)}")
        if name in JOBS:
            lines.append(f"{on} -a '(allranks completion --jobs 2>/dev/null)'")
    return "\n".join(lines) + "\n"


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", " ")[:100] + "'"
