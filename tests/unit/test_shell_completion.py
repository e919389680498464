"""`memascend completion`: a shell completes commands and options with it."""

import subprocess

import pytest

from memascend.cli import main


def completed(script, words):
    """Return what bash offers for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_memascend; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["memascend", "tr"], ["train"]),
        (["memascend", "train", "--dry"], ["--dry-run"]),
        (["memascend", "storage", "for"], ["format"]),
        (["memascend", "train", "--system", "lo"], ["lohan"]),
        (["memascend", "plan", "--system", "zero_i"], ["zero_infinity"]),
        (["memascend", "plan", "--testbed", "memascend-c"], ["memascend-c1", "memascend-c2", "memascend-c3"]),
        (["memascend", "train", "--checkpoints", "w"], ["weights"]),
    ],
)
def test_bash_completes_commands_and_options(capsys, words, offered):
    assert main(["completion", "bash"]) == 0
    assert completed(capsys.readouterr().out, words) == offered


def test_unknown_shell_gives_one_line_error(capsys):
    assert main(["completion", "fish"]) == 2
    assert "shell: 'fish' is unknown; choose one of bash, zsh, tcsh" in capsys.readouterr().err
