"""The dtypes that a tensor may have, by name, and the size of one element."""

from __future__ import annotations

from types import MappingProxyType

from distcore.v1.errors import PlanError, Problem

_SIZES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2 quint8 qint8 quint4x2 quint2x4 bits8 bits4x2 bits2x4 bits1x8 "
    "uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7",
    2: "uint16 int16 float16 bfloat16 bits16",
    4: "uint32 int32 float32 complex32 qint32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
ITEMSIZES = MappingProxyType(
    {name: size for size, names in _SIZES.items() for name in names.split()}
)


def itemsize(dtype: str) -> int:
    """The bytes of one element of `dtype`, named as torch names it without `torch.`.

    PlanError where the name is unknown.

    >>> itemsize("bfloat16")
    2
    """
    size = ITEMSIZES.get(dtype) if isinstance(dtype, str) else None
    if size is None:
        text = f"unknown {dtype!r}; known are {', '.join(sorted(ITEMSIZES))}"
        raise PlanError(Problem("dtype", "dtype", text))
    return size
