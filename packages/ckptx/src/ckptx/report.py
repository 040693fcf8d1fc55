"""LoadReport, SaveReport: what was moved, beside the least that had to be moved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank's part in a load was.

    `bytes_read`, `bytes_sent` and `bytes_received` are the calling rank's: bytes of tensors read
    from files (gaps included where rows were read whole), and bytes sent to and received from
    other ranks. `header_bytes_read` is what this rank read besides, to learn what the files hold.

    `lower_bound_read` is for the whole group: the bytes of the checkpoint that at least one rank
    needs, so no load can make the sum of all ranks' `bytes_read` smaller.
    `lower_bound_slowest_read` is the least that the rank which reads most must read, however the
    reads are shared out among the ranks that need them. `lower_bound_received` is the calling
    rank's: the bytes that it needs and did not read itself.

    `missing` are keys of the state dict that the checkpoint has not, `unexpected` the reverse;
    both are empty after a strict load. `seconds` is the wall time on this rank.
    """

    bytes_read: int
    bytes_sent: int
    bytes_received: int
    header_bytes_read: int
    lower_bound_read: int
    lower_bound_slowest_read: int
    lower_bound_received: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What one rank's part in a save was.

    `bytes_written` are the calling rank's bytes of tensors; `file_bytes_written` are all that it
    wrote, headers too. `files` are the names of its files. `total_bytes` are the bytes of tensors
    that all ranks wrote, each once, and `lower_bound_slowest_write` is the least that the rank
    which writes most must write, however they are shared out. `seconds` is the wall time on this
    rank, from the call to the return, `wait` included.
    """

    bytes_written: int
    file_bytes_written: int
    files: tuple[str, ...]
    total_bytes: int
    lower_bound_slowest_write: int
    seconds: float
