"""Short files, short functions, few parameters: whatever is over a limit is listed, and the lists only shrink."""

import ast
import itertools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 500, 60, 8
FOLDERS = ("baselines", "docs", "hardware", "memascend", "workflows")

# Lines by file. An entry may fall, and must go once the file is short enough.
LONG_FILES: dict[str, int] = {}
# Lines by "file: function".
LONG_FUNCTIONS = {"memascend/engine/streaming.py: optimizer": 68}
# Parameters by "file: function". The reason of an entry that stays is next to the function.
MANY_PARAMETERS = {
    "memascend/memory/ledger.py: record": 12,
    "memascend/ops/adamw.py: adamw_": 13,
    "memascend/ops/adamw8.py: adamw8_": 13,
    "memascend/storage/errors.py: __init__": 9,
    "memascend/storage/open_paths.py: open_paths": 9,
}
REASON = "# More than eight parameters: "


def sources() -> list[Path]:
    names = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    found = [ROOT / name for name in names if Path(name).suffix in {".cpp", ".h", ".py"} and (ROOT / name).is_file()]
    if not found:
        pytest.skip("not a git checkout: what is committed cannot be told")
    return found


def functions(text: str) -> dict[str, tuple[int, int]]:
    """Return (lines, parameters) by name, of several functions of one
    name the largest. `self` and `cls` do not count."""
    found: dict[str, tuple[int, int]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len(named) - bool(named and named[0].arg in ("self", "cls"))
            lines, most = found.get(node.name, (0, 0))
            found[node.name] = max(lines, node.end_lineno - node.lineno + 1), max(most, count)
    return found


def test_lines_and_parameters_of_functions_are_counted():
    text = "class A:\n    def f(self, a, /, b, *, c):\n        return a\n\ndef g(*args, **more):\n    pass\n"
    assert functions(text) == {"f": (2, 3), "g": (2, 0)}


def over(limit: int, sizes: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def require_listed(found: dict[str, int], listed: dict[str, int]) -> None:
    assert found.keys() - listed.keys() == set(), "split it"
    assert {name for name, size in found.items() if size > listed[name]} == set(), "it was shorter: split it"
    assert listed.keys() - found.keys() == set(), "no longer over the limit: take it off the list"


def by_function(at: int) -> dict[str, int]:
    found = {}
    for path in sources():
        if path.suffix == ".py":
            for name, counted in functions(path.read_text()).items():
                found[f"{path.relative_to(ROOT)}: {name}"] = counted[at]
    return found


def test_files_are_short():
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources()}
    require_listed(over(MOST_LINES, lines), LONG_FILES)


def test_functions_are_short():
    require_listed(over(MOST_LINES_OF_A_FUNCTION, by_function(0)), LONG_FUNCTIONS)


def test_functions_have_few_parameters():
    require_listed(over(MOST_PARAMETERS, by_function(1)), MANY_PARAMETERS)


@pytest.mark.parametrize("place", MANY_PARAMETERS)
def test_reason_for_many_parameters_precedes_the_function(place):
    file, _, name = place.partition(": ")
    lines = (ROOT / file).read_text().splitlines()
    above = [before.strip() for before, line in itertools.pairwise(lines) if line.strip().startswith(f"def {name}(")]
    assert any(line.startswith(REASON) for line in above)


def test_a_list_must_be_up_to_date():
    require_listed({"a": 9}, {"a": 9})
    for found, listed in (({"a": 9}, {}), ({"a": 10}, {"a": 9}), ({}, {"a": 9})):
        with pytest.raises(AssertionError):
            require_listed(found, listed)
