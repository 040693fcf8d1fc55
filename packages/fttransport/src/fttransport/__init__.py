"""A live replica of a training run heals a broken one."""

from importlib.metadata import version

from distcore.v1 import require

require(1, by="fttransport")

# Addresses
from fttransport.address import join_metadata

# What may be in a state
from fttransport.codec import Codec

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

# Transports
from fttransport.http_transport import HTTPTransport
from fttransport.pg_transport import PGTransport
from fttransport.report import Report
from fttransport.security import Security
from fttransport.transport import CheckpointTransport

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
