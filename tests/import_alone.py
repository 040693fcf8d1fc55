"""Import every module of an installed package, with nothing beside it but what it declares.

Run as `python -I import_alone.py PACKAGE` in an environment that holds no test tools.
A module may miss only what one of the package's extras names.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from importlib.metadata import requires


def optional(package: str) -> set[str]:
    """The names that the extras of a package bring."""
    lines = [line for line in requires(package) or () if "extra ==" in line]
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines}


def main(package: str) -> None:
    """Import all modules; leave with an error at the first that misses something undeclared."""
    allowed = optional(package)
    root = importlib.import_module(package)
    names = [info.name for info in pkgutil.walk_packages(root.__path__, f"{package}.")]
    for name in names:
        if name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").split(".")[0]
            if missing.lower().replace("_", "-") not in allowed:
                sys.exit(f"{name} needs {missing!r}, which the metadata of {package} does not name")
            print(f"{name} is left out: it needs {missing!r} from an extra")
    print(f"{package}: imported {len(names) + 1} modules")


if __name__ == "__main__":
    main(sys.argv[1])
