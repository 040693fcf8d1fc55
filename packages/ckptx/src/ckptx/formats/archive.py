"""Archive: the uncompressed zip file that torch writes for one object, as a part of a larger file.

It has a structure (`data.pkl`) and the bytes of each storage (`data/0`, ...). Here its directory
is read, so that bytes of a tensor can be read where they lie, and one with a single storage is
written around bytes that are written by themselves.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from ckptx.errors import FormatError

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_ENTRY: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_END64_PLACE: Final = struct.Struct("<4sIQI")
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_NONE32: Final = 0xFFFFFFFF
_TAIL_NBYTES: Final = 1024
_ALIGNMENT: Final = 64


class Ranges(Protocol):
    """What gives ranges of a file."""

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """`nbytes` bytes from byte `offset` on."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member: the byte of its header in the archive, its size, and the CRC-32 of its bytes."""

    header: int
    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive in `file` from byte `offset` on; members by name without the archive's own."""

    file: str
    offset: int
    nbytes: int
    members: Mapping[str, Member]

    @classmethod
    def read(cls, reader: Ranges, file: str, offset: int, nbytes: int) -> Archive:
        """Read the directory; FormatError where the bytes are no such archive."""
        tail = _Tail(reader, file, offset, nbytes)
        try:
            return cls(file, offset, nbytes, _members(tail))
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            text = f"the {nbytes} bytes from here on are no archive of torch: {error}"
            raise FormatError(text, file=file, offset=offset) from error

    def place(self, reader: Ranges, name: str) -> tuple[int, int]:
        """The byte of the file where a member's bytes begin, and how many they are."""
        member = self.members.get(name)
        if member is None:
            raise FormatError(f"the archive has no {name}", file=self.file, offset=self.offset)
        at = self.offset + member.header
        if member.header + _LOCAL.size > self.nbytes:
            raise FormatError(f"the header of {name} lies outside", file=self.file, offset=at)
        found = _LOCAL.unpack(reader.read(self.file, at, _LOCAL.size))
        begin = at + _LOCAL.size + found[-2] + found[-1]
        if found[0] != b"PK\x03\x04" or begin + member.nbytes > self.offset + self.nbytes:
            text = f"the bytes of {name} are not where the archive says"
            raise FormatError(text, file=self.file, offset=at)
        return begin, member.nbytes

    def contents(self, reader: Ranges, name: str) -> bytes:
        """The bytes of a member."""
        begin, nbytes = self.place(reader, name)
        return reader.read(self.file, begin, nbytes)


class _Tail:
    """The last bytes of an archive, read once; whatever lies before them is read when wanted."""

    def __init__(self, reader: Ranges, file: str, offset: int, nbytes: int) -> None:
        self.reader, self.file, self.offset, self.nbytes = reader, file, offset, nbytes
        self.begin = max(0, nbytes - _TAIL_NBYTES)
        self.data = reader.read(file, offset + self.begin, nbytes - self.begin)

    def read(self, begin: int, nbytes: int) -> bytes:
        """Bytes of the archive."""
        if begin < 0 or nbytes < 0 or begin + nbytes > self.nbytes:
            raise ValueError("a part of it lies outside")
        if begin >= self.begin:
            return self.data[begin - self.begin : begin - self.begin + nbytes]
        return self.reader.read(self.file, self.offset + begin, nbytes)


def _members(tail: _Tail) -> dict[str, Member]:
    at = tail.nbytes - _END.size
    mark, *_, count, nbytes, begin, _ = _END.unpack(tail.read(at, _END.size))
    if mark != b"PK\x05\x06":
        raise ValueError("it has no directory at its end")
    if _NONE32 in {nbytes, begin} or count == 0xFFFF:
        place = tail.read(at - _END64_PLACE.size, _END64_PLACE.size)
        _, _, where, _ = _END64_PLACE.unpack(place)
        *_, count, nbytes, begin = _END64.unpack(tail.read(where, _END64.size))
    data = tail.read(begin, nbytes)
    found = {}
    for _ in range(count):
        name, member, length = _entry(data)
        found[name.partition("/")[2]] = member
        data = data[length:]
    return found


def _entry(data: bytes) -> tuple[str, Member, int]:
    """The first entry of the directory: its name, what it says, and its length."""
    entry = _ENTRY.unpack_from(data)
    mark, method, crc, packed, nbytes = entry[0], entry[4], entry[7], entry[8], entry[9]
    name_end = _ENTRY.size + entry[10]
    end = name_end + entry[11]
    header = entry[16]
    if mark != b"PK\x01\x02" or method != 0:
        raise ValueError("a member is compressed, or its entry damaged")
    extra = data[name_end:end]
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, 4))
            nbytes = wide.pop(0) if nbytes == _NONE32 else nbytes
            packed = wide.pop(0) if packed == _NONE32 else packed
            header = wide.pop(0) if header == _NONE32 else header
        extra = extra[4 + length :]
    if packed != nbytes:
        raise ValueError("a member has two sizes")
    return data[_ENTRY.size : name_end].decode(), Member(header, nbytes, crc), end + entry[12]


@dataclass(frozen=True, slots=True)
class Frame:
    """What is written before and behind the `nbytes` bytes of the one storage of an archive.

    The sizes do not depend on the bytes, so that places in a file can be planned.
    """

    structure: bytes
    nbytes: int

    @property
    def head_nbytes(self) -> int:
        """How much lies before the bytes."""
        return len(self._before()[0])

    @property
    def total_nbytes(self) -> int:
        """The size of the whole archive."""
        head, tail = self.around(0)
        return len(head) + self.nbytes + len(tail)

    def around(self, crc: int) -> tuple[bytes, bytes]:
        """The head and the tail, for bytes with this CRC-32."""
        head, entries = self._before(crc)
        tail = _Members(len(head) + self.nbytes)
        tail.add("archive/version", b"3\n")
        directory = b"".join([*entries, *tail.entries])
        count, begin = len(entries) + 1, len(head) + self.nbytes + len(tail.data)
        end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), begin, 0)
        return head, bytes(tail.data) + directory + end

    def _before(self, crc: int = 0) -> tuple[bytes, list[bytes]]:
        members = _Members(0)
        members.add("archive/data.pkl", self.structure)
        members.add("archive/byteorder", b"little")
        members.open("archive/data/0", self.nbytes, crc)
        return bytes(members.data), members.entries


def archive_of(structure: bytes) -> bytes:
    """A whole archive that has no storage: that of an object without tensors."""
    members = _Members(0)
    for name, data in (("data.pkl", structure), ("byteorder", b"little"), ("version", b"3\n")):
        members.add(f"archive/{name}", data)
    directory = b"".join(members.entries)
    count = len(members.entries)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), len(members.data), 0)
    return bytes(members.data) + directory + end


class _Members:
    """Members written one after the other, from a byte of the archive on, and their entries."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.data = bytearray()
        self.entries: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        """Write a member whole."""
        self._header(name, len(data), zlib.crc32(data), b"")
        self.data += data

    def open(self, name: str, nbytes: int, crc: int) -> None:
        """Write the header of a member whose bytes follow, at a multiple of 64 bytes."""
        end = self.begin + len(self.data) + _LOCAL.size + len(name) + 4
        pad = -end % _ALIGNMENT
        self._header(name, nbytes, crc, struct.pack("<2sH", b"FB", pad) + b"Z" * pad)

    def _header(self, name: str, nbytes: int, crc: int, extra: bytes) -> None:
        at, label = self.begin + len(self.data), name.encode()
        sizes = (crc, nbytes, nbytes)
        head = (b"PK\x03\x04", 0, 0, 0, 0, 0, *sizes, len(label), len(extra))
        self.data += _LOCAL.pack(*head) + label + extra
        entry = (b"PK\x01\x02", 0, 0, 0, 0, 0, 0, *sizes, len(label), 0, 0, 0, 0, 0, at)
        self.entries.append(_ENTRY.pack(*entry) + label)
