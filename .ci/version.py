"""Whether a tag names the version of the package, and the changelog describes it: ``python .ci/version.py v0.1.0``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str, source: str, changelog: str) -> list[str]:
    """What keeps a tag from being published; nothing if all agree."""
    found = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    version = found[1] if found else "none"
    said = []
    if tag != f"v{version}":
        said.append(
            f"the tag is {tag}, but the package's version is {version}: tag it v{version}, or change __version__"
        )
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        said.append(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD': give [Unreleased] that heading")
    return said


def main(tag: str) -> int:
    """Print the problems."""
    source, changelog = ((ROOT / path).read_text() for path in ("src/hfta_func/__init__.py", "CHANGELOG.md"))
    found = problems(tag, source, changelog)
    print("\n".join(found) or f"{tag} can be published")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
