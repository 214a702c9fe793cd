"""Look for what the documentation names and the repository doesn't have.

    python tests/check_docs.py [--external]

Of README*.md, docs/*.md and ci/*.md: the target of every relative link, the heading of every anchor, and every path
in backticks or in a block of code. With ``--external`` also every link to another site
(needs a network; a session of the nightly workflow).
"""

from __future__ import annotations

import argparse
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Where a named path may start. The pages on a part of the engine leave src/pico_vllm/ out.
BASES = ("", "src/pico_vllm", "src/pico_vllm/bench", "tests")
#: A path whose first part is one of these is ours; others (K/V, tok/s, OWNER/NAME) may be anything.
OUR_FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "ci", ".ci", ".github")
FILE_ENDINGS = ("py", "md", "json", "jsonl", "toml", "txt", "yml", "yaml")

FENCE = re.compile(r"^(```+|~~~+).*?\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", re.MULTILINE)
HTML_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
PATH = re.compile(rf"(?<![\w/.{{<-])((?:[\w.*-]+/)+(?:[\w*-]+\.(?:{'|'.join(FILE_ENDINGS)})\b|[\w.*-]+)?)(?![\w{{])")
URL = re.compile(r"https?://[^\s)>`\"']+")


def pages(root: Path) -> list[Path]:
    """The files that are looked at."""
    return [*sorted(root.glob("README*.md")), *sorted(root.glob("docs/*.md")), *sorted(root.glob("ci/*.md"))]


def problems_of(root: Path) -> list[str]:
    """What is named and missing, as ``page: reason``."""
    return [f"{page.relative_to(root)}: {reason}" for page in pages(root) for reason in _problems_of_page(page, root)]


def _problems_of_page(page: Path, root: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    prose, code = split_code(text)
    for target in LINK.findall(prose):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path)
        if not file.exists():
            yield f"links to {path}, which doesn't exist"
        elif anchor and anchor not in anchors_of(file.read_text(encoding="utf-8")):
            yield f"links to {target}, which has no such heading"
    for piece in code:
        for path in PATH.findall(URL.sub("", piece)):
            if is_ours(path, root) and not any(exists(root / base, path) for base in BASES):
                yield f"names {path}, which doesn't exist"


def split_code(text: str) -> tuple[str, list[str]]:
    """The text without its code (a link's words in backticks stay a link), and the pieces of code."""
    blocks = [match.group(2) for match in FENCE.finditer(text)]
    rest = FENCE.sub("", text)
    inline = [match.group(2) for match in INLINE_CODE.finditer(rest)]
    return INLINE_CODE.sub("code", rest), blocks + inline


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page: lower case, punctuation dropped, spaces to hyphens."""
    anchors: set[str] = set(HTML_ANCHOR.findall(text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        anchor, count = slug, 0
        while anchor in anchors:  # a second heading of the same words
            count += 1
            anchor = f"{slug}-{count}"
        anchors.add(anchor)
    return anchors


def is_ours(path: str, root: Path) -> bool:
    """Whether a path with a slash means one of this repository: by its first folder, or by its ending."""
    first = path.split("/", 1)[0]
    in_package = (root / "src" / "pico_vllm" / first).is_dir() and first != ""
    return first in OUR_FOLDERS or (in_package and path.endswith(tuple(f".{end}" for end in FILE_ENDINGS)))


def exists(base: Path, path: str) -> bool:
    """Whether a path, which may hold ``*``, is there."""
    return any(base.glob(path.rstrip("/"))) if "*" in path else (base / path).exists()


def external_links(root: Path) -> list[str]:
    """Every link to another site, once."""
    links = {
        url.rstrip(".,;:")
        for page in pages(root)
        for url in URL.findall(split_code(page.read_text(encoding="utf-8"))[0])
    }
    return sorted(links)


def why_dead(url: str) -> str | None:
    """Why a site's page is gone, or None; a site that refuses programs (403, 429) isn't called dead."""
    request = urllib.request.Request(url, headers={"User-Agent": "pico-vllm link check"})
    try:
        with urllib.request.urlopen(request, timeout=30):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code in (403, 429) else f"answers {error.code}"
    except OSError as error:
        return f"can't be reached: {error}"


def main() -> int:
    """Print what is missing; 1 when something is."""
    parser = argparse.ArgumentParser(description="Check the links and the file names in the documentation.")
    parser.add_argument("--external", action="store_true", help="also ask other sites for what is linked there")
    args = parser.parse_args()
    problems = problems_of(ROOT)
    links = external_links(ROOT) if args.external else []
    problems += [f"{url} {reason}" for url in links if (reason := why_dead(url))]
    for problem in problems:
        print(problem, file=sys.stderr)
    external = f", {len(links)} links to other sites" if args.external else ""
    print(f"{len(pages(ROOT))} pages{external}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
