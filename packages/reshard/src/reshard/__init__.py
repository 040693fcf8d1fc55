"""Live transfer of whole PyTorch state dicts between meshes and placements."""

from importlib.metadata import version

from distcore.v1 import require

require(1, by="reshard")

__version__ = version("reshard")
