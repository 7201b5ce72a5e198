"""Hooks of mkdocs (mkdocs.yml): README.md is the site's first page, and links that lead out of docs/ become words.

Docstrings name what they mean in Sphinx's roles; on the site these are names in the code's type.

``make site`` builds it with warnings as errors.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Long generated pages have every word: in search others come first.
_TABLES = {
    f"{name}.md" for name in ("families", "classes", "adapters", "dtypes", "inference", "fuzz")
}
_DECISIONS = "decisions/"
_ROLE = re.compile(r":(?:mod|func|class|data|meth|attr|exc):<code>~?\.*([^<]*)</code>")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as ``index.md``, its links as seen from docs/."""
    from mkdocs.structure.files import File

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    home = _LINK.sub(lambda link: f"[{link[1]}]({seen_from_docs(link[2])})", readme)
    files.append(File.generated(config, "index.md", content=home))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to what is not part of the site stay as the words they are on, and so do keys of keys in messages."""
    source = "" if page is None else page.file.src_uri
    if source in _TABLES or source.startswith(_DECISIONS):
        page.meta.setdefault("search", {"boost": 0.1})
    plain = markdown.replace("'][", "']\\[")
    return _LINK.sub(lambda link: link[1] if leads_out(link[2]) else link[0], plain)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Sphinx's roles become code, and the two colons before its literal blocks one."""
    return _ROLE.sub(r"<code>\1</code>", html).replace("::</p>", ":</p>")


def seen_from_docs(target: str) -> str:
    """A link of README.md, in a page that is in docs/."""
    if "://" in target or target.startswith("#"):
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def leads_out(target: str) -> bool:
    """Whether a link of a page in docs/ is to a file of the repository that is elsewhere."""
    return target.startswith("../")
