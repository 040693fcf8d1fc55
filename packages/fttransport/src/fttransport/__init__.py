"""A live replica of a training run heals a broken one."""

from importlib.metadata import version

from distcore.v1 import require

require(1, by="fttransport")

__version__ = version("fttransport")
