"""torch's C++ names of dtypes, as its own recorder writes them, without importing torch."""

from __future__ import annotations

_NAMES = {
    "float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "uint16": "UInt16",
    "uint32": "UInt32", "uint64": "UInt64", "complex32": "ComplexHalf", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip


def dtype_name(dtype: object) -> str:
    """ "Float" for torch.float32; float8 variants keep their long name, as in torch."""
    text = str(dtype).removeprefix("torch.")
    return _NAMES.get(text, text.replace("float8", "Float8"))
