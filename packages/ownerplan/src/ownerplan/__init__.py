"""Who runs the matrix step of which parameter, and a Muon that uses it."""

from importlib.metadata import version

from distcore.v1 import require

require(1, by="ownerplan")

__version__ = version("ownerplan")
