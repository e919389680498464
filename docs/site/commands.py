"""The `memascend` command as pages of the documentation: JSON of markdown by page, on standard output (make docs).

Run by the project's own interpreter, since the parsers import what they describe.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator


def main() -> None:
    os.environ["COLUMNS"] = "80"  # argparse wraps usage to it
    from memascend.cli import command_line

    pages = {path[0]: page(path[0], parser) for path, parser in commands(command_line()) if len(path) == 1}
    json.dump(pages, sys.stdout)


def commands(parser: argparse.ArgumentParser, above: tuple[str, ...] = ()) -> Iterator:
    """(words, parser) of each command below `parser`, in its order."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield (*above, name), below
                yield from commands(below, (*above, name))


def page(name: str, parser: argparse.ArgumentParser) -> str:
    parts = [f"# memascend {name}\n", *described(parser)]
    for words, below in commands(parser, (name,)):
        parts += [f"## memascend {' '.join(words)}\n", *described(below)]
    return "\n".join(parts)


def described(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Description, usage, and a table of arguments and options, as `--help` has them."""
    if parser.description:
        yield f"{escaped(parser.description)}\n"
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield f"```text\n{usage}\n```\n"
    formatter = parser._get_formatter()
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    rows = [row for action in shown for row in rows_of(action, formatter)]
    if rows:
        yield "| argument | meaning |\n|---|---|\n" + "\n".join(rows) + "\n"


def rows_of(action: argparse.Action, formatter: argparse.HelpFormatter) -> Iterator[str]:
    if isinstance(action, argparse._HelpAction):
        return
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            yield f"| `{choice.dest}` | {cell(formatter._expand_help(choice))} |"
        return
    name = formatter._format_action_invocation(action)
    yield f"| `{name}` | {cell(formatter._expand_help(action) if action.help else '')} |"


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*")


def cell(text: str) -> str:
    return escaped(text).replace("|", "\\|")


if __name__ == "__main__":
    main()
