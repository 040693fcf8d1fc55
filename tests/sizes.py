"""What an installed package brings, as a tree: each distribution once, with the size of its files.

Run as `python -I sizes.py PACKAGE` in an environment that holds only that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path


def nbytes(found: Distribution) -> int:
    """The bytes of the files that were installed, without what was compiled from them."""
    paths = (Path(str(path.locate())) for path in found.files or () if path.suffix != ".pyc")
    return sum(path.stat().st_size for path in paths if path.is_file())


def needs(found: Distribution) -> list[str]:
    """The names of what it requires without extras, in order."""
    wanted = {re.split(r"[^\w.-]", one)[0] for one in found.requires or () if "extra" not in one}
    return sorted(re.sub(r"[-_.]+", "-", one).lower() for one in wanted)


def lines(name: str, depth: int, seen: set[str]) -> Iterator[str]:
    """One line for each distribution, and for those below it where it comes first."""
    indent = "  " * depth
    try:
        found = distribution(name)
    except PackageNotFoundError:  # it is for another system or version of Python
        return
    if name in seen:
        yield f"{indent}{name}: see above"
        return
    seen.add(name)
    yield f"{indent}{name} {found.version}: {nbytes(found) / 1e6:,.2f} MB"
    for other in needs(found):
        yield from lines(other, depth + 1, seen)


def main(package: str) -> None:
    """Print the tree, and all that is installed together."""
    seen: set[str] = set()
    print("\n".join(lines(package, 0, seen)))
    total = sum(nbytes(found) for found in distributions())
    print(f"{len(seen)} distributions; with what else is installed: {total / 1e6:,.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1])
