"""A live replica of a training run heals a broken one."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from distcore.v1 import on_first_use, require

require(1, by="fttransport")

# Addresses
from fttransport.address import join_metadata

# Errors
from fttransport.errors import (
    AuthError,
    CodecRefused,
    DeadlineExceeded,
    IntegrityError,
    LayoutMismatch,
    NotServing,
    SourceLost,
    SourceSilent,
    StepMismatch,
    TransportError,
)

# What needs no torch
from fttransport.report import Report
from fttransport.security import Security
from fttransport.transport import CheckpointTransport

if TYPE_CHECKING:
    # What does: the transports, and what may be in a state
    from fttransport.codec import Codec
    from fttransport.http_transport import HTTPTransport
    from fttransport.pg_transport import PGTransport

__version__ = version("fttransport")

__all__ = [
    # Transports
    "CheckpointTransport",
    "HTTPTransport",
    "PGTransport",
    "Report",
    "Security",
    "Codec",
    "join_metadata",
    # Errors
    "AuthError",
    "CodecRefused",
    "DeadlineExceeded",
    "IntegrityError",
    "LayoutMismatch",
    "NotServing",
    "SourceLost",
    "SourceSilent",
    "StepMismatch",
    "TransportError",
]

_HOMES = {"Codec": "codec", "HTTPTransport": "http_transport", "PGTransport": "pg_transport"}

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
