"""One node's part of an incident as one packed file: boxes/, stacks/AGENT/, and part.json with what is missing.

Bounded on both sides: what does not fit is left out and named; what arrives may neither leave its folder nor grow
beyond the limit when it is unpacked.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path, PurePosixPath

from allranks.errors import InputError

MAX_PACKED_BYTES = 64 << 20
MAX_BYTES = 512 << 20
FACTS = "part.json"


def pack_part(folder: Path, missing: list[str], *, limit: int = MAX_PACKED_BYTES) -> bytes:
    """All files of a folder, boxes first; those beyond the limit are named in part.json instead."""
    out = io.BytesIO()
    missing = list(missing)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as pack:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            try:
                data = path.read_bytes()
            except OSError as error:
                missing.append(f"{name}: {error.strerror or error}")
                continue
            if out.tell() + len(data) > limit:
                missing.append(f"{name}: left out, the part is limited to {limit >> 20} MiB")
            else:
                pack.writestr(name, data)
        pack.writestr(FACTS, json.dumps({"missing": missing}))
    return out.getvalue()


def unpack_part(data: bytes, folder: Path, *, limit: int = MAX_BYTES) -> list[str]:
    """Puts a part into an incident folder; returns what its node could not give. InputError for a bad part."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as pack:
            entries = [entry for entry in pack.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > limit:
                raise InputError(f"a part of more than {limit >> 20} MiB")
            for entry in entries:
                if entry.filename != FACTS:
                    _write(folder, entry.filename, pack.read(entry))
            facts = json.loads(pack.read(FACTS)) if FACTS in pack.namelist() else {}
    except (zipfile.BadZipFile, KeyError, ValueError, OSError) as error:
        raise InputError(f"a part that cannot be read: {error}") from error
    return [str(item) for item in facts.get("missing", ())]


def _write(folder: Path, name: str, data: bytes) -> None:
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or place.parts[0] not in ("boxes", "stacks"):
        raise InputError(f"a part with a file {name!r}")
    target = folder / place
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
