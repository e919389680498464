"""The `memascend` command. Invalid input gives one line on standard error and exit status 2."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memascend import __version__
from memascend.compare import add_compare
from memascend.doctor.command import add_doctor
from memascend.planner.command import add_plan, count
from memascend.storage.commands import add_storage
from memascend.suggestions import did_you_mean
from memascend.terminal import printable
from memascend.training.command import add_export, add_generate, add_info, add_train, add_verify


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line, without the usage text, and refuses abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._command: list[str] = []  # the subcommand given, if any
        self.refused: dict[str, str] = {}  # options that are refused, with the reason

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; report a mistyped option before argparse reports arguments that it makes missing."""
        words = list(sys.argv[1:] if args is None else args)
        if self._subparsers is not None:
            commands = self._subparsers._group_actions[0].choices or ()
            self._command = [word for word in words[:1] if word in commands]
        for word in words[: words.index("--")] if "--" in words else words:
            if self._subparsers is not None and not word.startswith("-"):
                break  # the rest belongs to the subcommand
            option = word.partition("=")[0]
            if re.fullmatch(r"--[\w-]+", option) and option not in self._option_string_actions:
                if option in self.refused:
                    self.error(f"{option}: {self.refused[option]}")
                self.error(f"unknown option {option}{did_you_mean(option, self._option_string_actions, cutoff=0.75)}")
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Report an unknown command or choice, with the most similar known one as a hint."""
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
            hint = did_you_mean(value, known)
            self.error(f"{name}: {value!r} is unknown{hint}; choose one of {', '.join(known)}")

    def error(self, message: str) -> NoReturn:
        words = message.removeprefix("unrecognized arguments: ").split()
        if words != message.split() and any(Path(word).exists() for word in words):
            message += "; quote patterns, such as --files '*.md', or the shell expands them"
        raise ValueError(f"{message} (see {' '.join([self.prog, *self._command])} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    The status is 0, 2 for an error, 130 after an interrupt, or a subcommand's own (plan and doctor: 1 for no).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = command_line().parse_args(arguments)
        answer = options.run(options)
        text, status = answer if isinstance(answer, tuple) else (answer, 0)
        print(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("memascend: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, ImportError) as error:
        print(f"memascend: error: {printable(' '.join(_message_of(error).split()))}", file=sys.stderr)
        return 2
    return int(status)


def _message_of(error: Exception) -> str:
    """Return the text of an error; errors of the operating system are given by path and reason, without the number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(prog="memascend", description="Full-parameter fine-tuning where host memory is scarce.")
    parser.add_argument("--version", action="version", version=f"memascend {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=_Parser)
    add_plan(commands, _local_machine)
    add_doctor(commands)
    _add_bench(commands)
    add_storage(commands)
    add_train(commands)
    add_info(commands)
    add_export(commands)
    add_generate(commands)
    add_verify(commands)
    add_compare(commands)
    _add_completion(commands)
    return parser


def _local_machine(nvme: Path | None) -> Any:
    from memascend.doctor.local import local_machine

    return local_machine(nvme)


def _add_bench(commands: Any) -> None:
    from memascend.bench.command import add_benchmarks

    parser = commands.add_parser(
        "bench",
        help="benchmark each part against its peers and its limit, in the same run",
        description="Alternating rounds; medians with quartiles. Keep the machine otherwise idle.",
    )
    add_benchmarks(parser.add_subparsers(dest="part", required=True, metavar="part", parser_class=_Parser), count)


def _add_completion(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a completion script for your shell",
        description="Print a completion script. For bash, for example: memascend completion bash > "
        "~/.local/share/bash-completion/completions/memascend",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> str:
    import shtab

    from memascend import systems
    from memascend.planner.command import testbeds
    from memascend.training.config import choices

    parser = command_line()
    _offer(parser, {"system": systems.names(), "testbed": ["local", *testbeds()], **choices()})
    return shtab.complete(parser, shell=options.shell)


def _offer(parser: argparse.ArgumentParser, values: Mapping[str, Sequence[str]]) -> None:
    """Set the choices of options whose values are checked only later, so that completion scripts can offer them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _offer(command, values)
        elif action.option_strings and action.dest in values:
            action.choices = list(values[action.dest])


if __name__ == "__main__":
    sys.exit(main())
