"""What `mkdocs build` is given beside the pages in docs/ (see mkdocs.yml).

- Pages that are made: one for each command (from `.cache/commands.json`, which docs/site/commands.py writes).
- Pages and pictures from elsewhere in the repository that pages in docs/ link to: `ELSEWHERE`.
- A style sheet.
- The script that lets search run in pages that are opened from disk; the plugin would take one from the network.
- Links to other files of the repository become their path, since a built site has no source tree beside it.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ROOT / ".cache/commands.json"
ASSETS = {name: ROOT / "docs/site" / name for name in ("iframe-worker.js", "wide.css")}
LINK = re.compile(r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
# Path in the repository: place in the site.
ELSEWHERE = {
    "README.md": "about.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    **{
        path.relative_to(ROOT).as_posix(): f"records/{path.parent.name}.md"
        for path in sorted(ROOT.glob("results/reference/*/README.md"))
    },
    **{path.relative_to(ROOT).as_posix(): f"img/{path.name}" for path in sorted(ROOT.glob("figures/gallery/*.png"))},
}


def on_files(files, config):
    for path, place in ELSEWHERE.items():
        if place.endswith(".md"):
            files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    for name, path in ASSETS.items():
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(path)))
    for name, text in json.loads(COMMANDS.read_text(encoding="utf-8")).items():
        files.append(File.generated(config, f"reference/commands/{name}.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    here = next((path for path, place in ELSEWHERE.items() if place == page.file.src_uri), None)
    here = here or f"docs/{page.file.src_uri}"
    return outside_of_code(markdown, lambda text: LINK.sub(lambda link: moved(link, here, page.file.src_uri), text))


def outside_of_code(markdown, change):
    """`change` applied to all but fenced blocks."""
    parts = re.split(r"(^```.*?^```[ \t]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def moved(link, here, place):
    """A link of the file `here` in the repository, as the page at `place` in the site has it."""
    target, _, anchor = link["target"].partition("#")
    if not target or re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    inside = ELSEWHERE.get(path) or ELSEWHERE.get(f"{path}/README.md")
    if inside is None and path.startswith("docs/"):
        inside = path.removeprefix("docs/")
    if inside is None:
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{here} links to {path}, which does not exist")
        return link["text"] if link["text"].strip("`") == path else f"{link['text']} (`{path}`)"
    relative = posixpath.relpath(inside, posixpath.dirname(place) or ".")
    return f"{link['mark']}[{link['text']}]({relative}{'#' + anchor if anchor else ''})"
