"""Print a shell script that completes subcommands, flags, choices of flags and names of recipes. Any other word is
completed as a file name. The script does not start Python while a line is completed.
"""

import argparse
from collections.abc import Mapping

from ..recipes import LIBRARY
from .look import show
from .parser import Parser

HELP = "print a script with which a shell completes hfscale's command lines"
EXAMPLE = """eval "$(hfscale completion bash)"            # in ~/.bashrc; zsh: in ~/.zshrc, behind compinit
hfscale completion fish > ~/.config/fish/completions/hfscale.fish"""

_BASH = """_hfscale() {{
    local words
    case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
    "1 "*) words="{commands}" ;;
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _hfscale hfscale
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> None:
    commands: Mapping[str, Parser] = arguments.commands
    text = script(arguments.shell, commands)
    show(arguments, {"shell": arguments.shell, "script": text}, text.removesuffix("\n"))


def script(shell: str, commands: Mapping[str, Parser]) -> str:
    """Return the script with which ``shell`` (bash, zsh or fish) completes command lines of hfscale; ``commands`` are
    the parsers of all subcommands.
    """
    cases = []
    fish = []
    for name, parser in commands.items():
        text = (parser.description or "").partition(".")[0].replace("\n", " ").replace("'", "")
        fish.append(f"complete -c hfscale -n __fish_use_subcommand -f -a {name} -d '{text}'\n")
        within = f"complete -c hfscale -n '__fish_seen_subcommand_from {name}'"
        for flag, action in parser.flags().items():
            choices = " ".join(action.choices or ())
            cases += [f'    *" {name} {flag}") words="{choices}" ;;'] if choices else []
            fish.append(
                f"{within} -l {flag.removeprefix('--')}"
                + (f" -x -a '{choices}'\n" if choices else "\n")
            )
        places = _places(parser)
        cases.append(f'    *" {name} "*) words="{" ".join([*places, *parser.flags()])}" ;;')
        fish += [f"{within} -a '{' '.join(places)}'\n"] if places else []
    bash = _BASH.format(commands=" ".join(commands), cases="\n".join(cases))
    return {
        "fish": "".join(fish),
        "bash": bash,
        "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{bash}",
    }[shell]


def _places(parser: Parser) -> list[str]:
    """Return the words that complete a subcommand's positional arguments: their choices, and the names of recipes that
    ship with hfscale.
    """
    places: list[str] = []
    for action in parser.arguments:
        if not action.option_strings:
            places += action.choices or ()
        if action.dest == "recipe":
            places += sorted(path.stem for path in LIBRARY.glob("*.yaml"))
    return places
