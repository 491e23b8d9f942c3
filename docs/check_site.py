"""Check a built site: every link and anchor inside it resolves, and nothing is loaded from outside.

python docs/check_site.py site
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    "audio": ("src",),
    "embed": ("src",),
    "iframe": ("src",),
    "img": ("src", "srcset"),
    "link": ("href",),
    "object": ("data",),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
}
"""What a browser fetches unasked, by tag."""

OUTSIDE = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^\s\"')]+")


class Page(HTMLParser):
    """The links, the loaded addresses and the anchors of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += [given[name] for name in LOADS.get(tag, ()) if name in given]


def problems(site: Path) -> Iterator[str]:
    """What is wrong with a site, in lines."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: there are no pages"
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        for address in page.loaded:
            if urlsplit(address).scheme not in ("", "data") or address.startswith("//"):
                yield f"{here}: loads {address} from outside"
            elif _missing(path, address):
                yield f"{here}: loads {address}, which is not there"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = _target(path, link)
            if _missing(path, link):
                yield f"{here}: links to {link}, which is not there"
            elif target in pages and unquote(parts.fragment) not in ("", *pages[target].anchors):
                yield f"{here}: links to {link}, an anchor that is not there"
    for path in sorted(site.rglob("*.css")):
        for found in OUTSIDE.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: {found}"


def _missing(path: Path, address: str) -> bool:
    # The page of an error stands at any depth, so its addresses are absolute.
    if urlsplit(address).scheme or path.name == "404.html":
        return False
    return not _target(path, address).exists()


def _target(path: Path, link: str) -> Path:
    inside = unquote(urlsplit(link).path)
    return (path.parent / inside).resolve() if inside else path


def main(folder: str) -> int:
    found = list(problems(Path(folder)))
    print("\n".join(found) or f"{folder}: all links resolve, and nothing comes from outside.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
