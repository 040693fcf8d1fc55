"""Regions, layouts, plans and channels: the core that moves the state of a distributed run."""

from importlib.metadata import version

__version__ = version("distcore")
