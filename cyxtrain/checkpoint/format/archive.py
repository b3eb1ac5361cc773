"""An uncompressed zip whose checksums cover every byte.

    <entries>        in the given order
    manifest.json    format and version, and size and xxh3_128 of each entry above
    zip's records    the headers between the entries, and the directory after them
    zip's comment    xxh3_128 of all records

Any zip tool opens it. A reader uses nothing in it before every checksum was verified.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import xxhash

from cyxtrain.environment.regular_files import at_a_glance
from cyxtrain.errors import CheckpointError, brief

MANIFEST = "manifest.json"

Buffer = bytes | memoryview

_MANIFEST_LIMIT_BYTES = 65536
_MAX_AROUND_BYTES = 2 * 65536  # zip records around the entries, the longest comment included
_EPOCH_OF_ZIP = (1980, 1, 1, 0, 0, 0)  # not the time of writing: equal entries give equal bytes
_COMMENT = "xxh3_128 of the records: "
_COMMENT_BYTES = len(_COMMENT) + 32

# in an entry's own header of 30 bytes: signature, and lengths of name and extra field
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_SIGNATURE = b"PK\x03\x04"


@contextlib.contextmanager
def blaming(name: str, entry: str) -> Iterator[None]:
    """Turn errors that a corrupt or hostile file causes into a CheckpointError with file and entry."""
    try:
        yield
    except MemoryError:
        raise  # not the file's fault
    except CheckpointError as error:
        raise CheckpointError(f"Cannot use checkpoint {name}: {entry}: {brief(str(error))}.") from error
    except Exception as error:
        reason = brief(str(error)) or type(error).__name__
        raise CheckpointError(
            f"Checkpoint {name} is corrupt or is not a checkpoint: {entry}: {reason}. Try an earlier one."
        ) from error


def write_archive(
    file: BinaryIO, form: str, version: int, entries: Mapping[str, Sequence[Buffer]], summary: object = None
) -> None:
    """Write an archive to an empty file, open for reading and writing; equal entries give equal bytes.

    `summary` is a small JSON value, for `read_summary`.
    """
    listed: dict[str, dict[str, object]] = {}
    spans = []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, parts in entries.items():
            start, end, digest = _add(file, archive, name, parts)
            spans.append((start, end))
            listed[name] = {"size_bytes": end - start, "xxh3_128": digest}
        described = {"format": form, "version": version, "entries": listed, "summary": summary}
        manifest = json.dumps(described, separators=(",", ":"))
        spans.append(_add(file, archive, MANIFEST, [manifest.encode("ascii")])[:2])
        # Reserves the place of the checksum, which covers the records before it.
        archive.comment = b" " * _COMMENT_BYTES

    def read(start: int, end: int) -> bytes:
        file.seek(start)
        return file.read(end - start)

    size_bytes = file.seek(0, io.SEEK_END)
    comment = _records_comment(read, spans, size_bytes)
    file.seek(size_bytes - _COMMENT_BYTES)
    file.write(comment)


def look_at_archive(file: BinaryIO, name: str) -> None:
    """Refuse a file without the zip directory of an archive, without reading all of it."""
    with blaming(name, "the zip directory"), zipfile.ZipFile(at_a_glance(file, _MAX_AROUND_BYTES)) as archive:
        _require_sizes(archive.infolist(), file.seek(0, io.SEEK_END))


def read_summary(file: BinaryIO, older: str, limit_bytes: int) -> dict[str, Any]:
    """Return the summary in the manifest; an older archive has none: return the JSON of its entry `older`.

    Zip's own checksum protects both. An entry of more than `limit_bytes` is refused.
    """
    with zipfile.ZipFile(at_a_glance(file, limit_bytes)) as archive:
        _require_sizes(archive.infolist(), file.seek(0, io.SEEK_END))
        summary: dict[str, Any] | None = json.loads(archive.read(MANIFEST)).get("summary")
        return summary or json.loads(archive.read(older))


def read_archive(data: bytes, name: str, form: str, version: int, names: Sequence[str]) -> dict[str, memoryview]:
    """Return the content of each entry, without a copy, after verifying all of the archive."""
    view = memoryview(data)
    with blaming(name, "the zip directory"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:  # BytesIO shares the bytes
            listed = archive.infolist()
            comment = archive.comment
        spans = _spans(view, listed, {*names, MANIFEST})
    contents = {entry: view[start:end] for entry, (start, end) in spans.items()}
    with blaming(name, MANIFEST):
        crc = next(entry.CRC for entry in listed if entry.filename == MANIFEST)
        manifest = _manifest(contents.pop(MANIFEST), crc, form, version, names)
    for entry, content in contents.items():
        with blaming(name, entry):
            _check(content, manifest[entry])
    with blaming(name, "the zip records"):
        if comment != _records_comment(lambda first, end: view[first:end], spans.values(), len(view)):
            raise ValueError("their checksum is wrong")
    return contents


def _add(file: BinaryIO, archive: zipfile.ZipFile, name: str, parts: Sequence[Buffer]) -> tuple[int, int, str]:
    """Write an entry; return the start, the end and the digest of its content."""
    digest = xxhash.xxh3_128()
    entry = zipfile.ZipInfo(name, _EPOCH_OF_ZIP)
    entry.create_system = 3  # the same bytes on every operating system
    entry.file_size = sum(memoryview(part).nbytes for part in parts)  # decides between zip's two kinds of header
    with archive.open(entry, "w") as target:
        start = file.tell()
        for part in parts:
            digest.update(part)
            target.write(part)
        return start, file.tell(), digest.hexdigest()


def _records_comment(read: Callable[[int, int], Buffer], spans: Iterable[tuple[int, int]], size_bytes: int) -> bytes:
    """Return the archive's comment, its last bytes: the checksum of all bytes that are not content."""
    digest = xxhash.xxh3_128()
    position = 0
    for start, end in sorted(spans):
        digest.update(read(position, start))
        position = end
    digest.update(read(position, size_bytes - _COMMENT_BYTES))
    return f"{_COMMENT}{digest.hexdigest()}".encode()


def _check(content: memoryview, listed: Mapping[str, object]) -> None:
    if listed["size_bytes"] != len(content):
        raise ValueError(f"it has {len(content)} bytes, and the manifest says {listed['size_bytes']}")
    if listed["xxh3_128"] != xxhash.xxh3_128_hexdigest(content):
        raise ValueError("its checksum is wrong")


def _spans(view: memoryview, listed: Sequence[zipfile.ZipInfo], expected: set[str]) -> dict[str, tuple[int, int]]:
    """Return the start and the end of each entry's content, after checking the zip's structure."""
    names = [entry.filename for entry in listed]
    if len(names) != len(expected) or set(names) != expected:  # a zip may have two entries of one name
        raise ValueError(f"the entries are {names}, and must be {sorted(expected)}")
    # A cut file may end in another archive, inside a tensor.
    if min(entry.header_offset for entry in listed) != 0:
        raise ValueError("there are bytes before the first entry")
    return {entry.filename: _span(view, entry) for entry in listed}


def _require_sizes(listed: Iterable[zipfile.ZipInfo], size_bytes: int) -> None:
    """Refuse compressed entries, whose size is unknown, and bytes that belong to no entry."""
    content_bytes = 0
    for entry in listed:
        _require_stored(entry)
        content_bytes += entry.file_size
    if not 0 <= size_bytes - content_bytes <= _MAX_AROUND_BYTES:
        raise ValueError(f"its entries have {content_bytes:,} bytes, and the file {size_bytes:,}")


def _require_stored(entry: zipfile.ZipInfo) -> None:
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise ValueError(f"{entry.filename} is compressed or encrypted, which a checkpoint's entries never are")


def _span(view: memoryview, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the start and the end of a stored entry's content, by its own header."""
    _require_stored(entry)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(view, entry.header_offset)
    name_start = entry.header_offset + _LOCAL_HEADER.size
    start = name_start + name_bytes + extra_bytes
    if signature != _LOCAL_SIGNATURE or view[name_start : name_start + name_bytes] != entry.filename.encode():
        raise ValueError(f"the header of {entry.filename} is not where the directory says")
    if start + entry.file_size > len(view):
        raise ValueError(f"{entry.filename} is cut off: {entry.file_size} bytes do not fit into the file")
    return start, start + entry.file_size


def _manifest(
    content: memoryview, crc: int, form: str, version: int, names: Sequence[str]
) -> Mapping[str, Mapping[str, object]]:
    """Return the manifest's line of each entry; the zip's own CRC-32 protects the manifest."""
    if len(content) > _MANIFEST_LIMIT_BYTES or zlib.crc32(content) != crc:
        raise ValueError("its checksum is wrong")
    manifest = json.loads(bytes(content))
    if manifest["format"] != form:
        raise ValueError(f"the format is {manifest['format']!r}, and must be {form!r}")
    if manifest["version"] != version:
        raise CheckpointError(
            f"it is written in version {manifest['version']} of the format, and this cyxtrain reads version "
            f"{version}: use the cyxtrain that wrote it"
        )
    if set(manifest["entries"]) != set(names):
        raise ValueError(f"it lists {sorted(manifest['entries'])}, and must list {sorted(names)}")
    entries: Mapping[str, Mapping[str, object]] = manifest["entries"]
    return entries
