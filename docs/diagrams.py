"""Draw the two architecture pictures from the code: which package imports which, and how a number reaches a figure.

usage: python docs/diagrams.py     (make diagrams; needs graphviz's `dot`)
Writes docs/img/rooms.svg and docs/img/data-flow.svg.

Rooms and arrows come from the import statements, the flow from Snakemake's own graph of its rules, so that neither
picture shows what the code does not do. (torch is left out: all rooms but hardware use it.)
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/img"
TOP = ("memascend", "baselines", "hardware", "workflows")
GUESTS = {"deepspeed", "transformers"}
# Colours of the top-level packages; colour-blind safe (Okabe and Ito).
COLOURS = {"memascend": "#56B4E9", "baselines": "#E69F00", "hardware": "#009E73", "workflows": "#CC79A7"}
STYLE = (
    'graph [rankdir=LR, fontname="Helvetica", fontsize=11, nodesep=0.25, ranksep=0.7, bgcolor="white"];'
    'node [shape=box, style="rounded,filled", fillcolor="white", fontname="Helvetica", fontsize=10, height=0.3];'
    'edge [color="#555555", arrowsize=0.6, fontname="Helvetica", fontsize=9];'
)


def package(dotted: str) -> str | None:
    """The package of a dotted name: `memascend/memory`, `baselines`, `deepspeed` ...; None for what is not drawn."""
    parts = dotted.removeprefix("memascend.").split(".") if in_baselines(dotted) else dotted.split(".")
    if parts[0] in GUESTS:
        return parts[0]
    if parts[0] not in TOP:
        return None
    inside = ROOT / parts[0] / (parts[1] if len(parts) > 1 else "")
    splits = parts[0] == "memascend" and len(parts) > 1 and (inside.is_dir() or parts[1] == "_C")
    return f"{parts[0]}/{parts[1].replace('_C', 'csrc')}" if splits else parts[0]


def in_baselines(dotted: str) -> bool:
    """Whether the package that lies in baselines/ is meant (`memascend/baselines` is a link to it)."""
    return f"{dotted}.".startswith("memascend.baselines.")


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages() -> Iterator[str]:
    """The packages of ours, one level below the top ones too: a package that imports no other has no arrow."""
    for top in TOP:
        yield top
        yield from (f"{top}.{path.parent.name}" for path in sorted((ROOT / top).glob("*/__init__.py")))


def import_edges() -> set[tuple[str, str]]:
    """(package, package that it imports), for every Python file of the packages."""
    edges = set()
    for path in sorted(path for top in TOP for path in (ROOT / top).rglob("*.py")):
        own = package(".".join(path.relative_to(ROOT).parent.parts))
        edges |= {(own, other) for name in imported(path) if (other := package(name)) not in (None, own)}
    return edges


def packages_dot() -> str:
    """Graph of the packages: one cluster for the library, arrows from importer to imported."""
    edges = import_edges()
    names = {name for edge in edges for name in edge} | {package(name) for name in packages()}
    library = sorted(name for name in names if name.startswith("memascend"))
    lines = ["digraph rooms {", STYLE, 'subgraph cluster_library { label="memascend: mechanisms"; color="#999999";']
    lines += [node(name, COLOURS["memascend"]) for name in library]
    lines.append("}")
    lines += [node(name, COLOURS.get(name, "#EEEEEE")) for name in sorted(names - set(library))]
    lines += [f'"{a}" -> "{b}";' for a, b in sorted(edges)]
    return "\n".join([*lines, "}"])


def node(name: str, fill: str) -> str:
    return f'"{name}" [fillcolor="{fill}55", label="{name.removeprefix("memascend/")}"];'


def outputs() -> dict[str, list[str]]:
    """{rule: patterns of the files that it writes}, read from the rule files."""
    folders = {"RAW": "results/raw", "DERIVED": "results/derived", "FIGURES": "figures"}
    written = {}
    for path in sorted((ROOT / "workflows/rules").glob("*.smk")):
        for block in re.split(r"^rule ", path.read_text(), flags=re.MULTILINE)[1:]:
            section = re.search(r"^    output:\n((?:        .*\n)+)", block, re.MULTILINE)
            names = re.findall(r'f"(\{\w+\}/[^"]+)"', section.group(1)) if section else []
            for word, folder in folders.items():
                names = [name.replace(f"{{{word}}}", folder) for name in names]
            names = [name.replace("{{", "<").replace("}}", ">") for name in names]
            written[block.split(":", 1)[0]] = [name if Path(name).suffix else f"{name}.*" for name in names]
    return written


def flow_dot() -> str:
    """The rules in the order that Snakemake works them off for `figures`, each with the files that it writes."""
    command = [sys.executable, "-m", "snakemake", "figures", "--cores", "1", "--rulegraph"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"snakemake --rulegraph failed: {done.stderr.strip().splitlines()[-1]}")
    names = dict(re.findall(r'^\s*(\d+)\[label = "([^"]+)"', done.stdout, re.MULTILINE))
    edges = re.findall(r"^\s*(\d+) -> (\d+)", done.stdout, re.MULTILINE)
    written = outputs()
    sources = {
        "modelled": "memascend/planner\\lhardware/testbeds",
        "record": "workflows/run\\lbaselines\\lmemascend",
        "figure": "results/published (facts of the papers)\\lworkflows/papers/*/rows, figures.yaml\\lworkflows/panels",
        "claims_table": "workflows/papers/*/claims.yaml",
    }
    lines = ["digraph flow {", STYLE]
    for name in names.values():
        files = "".join(f"{file}\\l" for file in written.get(name, []))
        lines.append(f'"{name}" [fillcolor="{COLOURS["workflows"]}55", label="{name}\\n{files}"];')
    for rule, label in sources.items():
        if rule in names.values():
            lines.append(f'"from {rule}" [shape=plaintext, style="", label="{label}\\l"]; "from {rule}" -> "{rule}";')
    lines += [f'"{names[a]}" -> "{names[b]}";' for a, b in edges]
    return "\n".join([*lines, "}"])


def draw(dot: str, target: Path) -> None:
    done = subprocess.run(["dot", "-Tsvg"], input=dot, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"dot could not draw {target.name}: {done.stderr.strip()}")
    # The line that names the version of graphviz would change with every machine.
    lines = [line for line in done.stdout.splitlines() if "Generated by graphviz" not in line]
    target.write_text("\n".join(lines) + "\n")
    print(target.relative_to(ROOT))


def main() -> int:
    if not shutil.which("dot"):
        sys.exit("dot is missing; install it with: sudo apt-get install -y graphviz")
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw(packages_dot(), IMAGES / "rooms.svg")
    draw(flow_dot(), IMAGES / "data-flow.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
