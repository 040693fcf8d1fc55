"""Counts: ints with names, as attributes and as a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from typing import Any, ClassVar


class Counts(Mapping[str, int]):
    """The base of frozen dataclasses whose fields are ints: each is a mapping of them too.

    In the order of the fields; KeyError for any other name.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __getitem__(self, name: str) -> int:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return int(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))
