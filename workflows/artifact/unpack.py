"""Unpack a zip from an unknown author, and refuse one that programs would read differently or that
leaves its folder."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

REGULAR = (0, stat.S_IFREG, stat.S_IFDIR)  # file types of an entry; 0 if the program that packed it stores none
# Kinds of extra fields that other programs add: sizes over 4 GiB, times and owners.
HARMLESS = {0x0001, 0x000A, 0x5455, 0x5855, 0x7855, 0x7875}
LARGEST = 4 << 30  # limit in bytes; a bundle of all profiles has less than a twentieth of it
_STREAMS = 1 << 3  # flag of an entry: its sizes follow its data
_STREAMED = (12, 16, 20, 24)  # possible lengths of these sizes in bytes


def unpack(bundle: Path, into: Path) -> Path:
    """Unpack a bundle and return its one folder.

    Raises ValueError if the zip is no bundle or contains paths that lead out of it; the caller adds the zip's name.
    """
    try:
        with zipfile.ZipFile(bundle) as file:
            names = [PurePosixPath(name) for name in file.namelist()]
            if min((entry.header_offset for entry in file.infolist()), default=0):
                raise ValueError("it does not begin with its first file: it is not unpacked")
            types = {entry.filename: stat.S_IFMT(entry.external_attr >> 16) for entry in file.infolist()}
            if odd := [name for name, kind in types.items() if kind not in REGULAR]:
                raise ValueError(f"{odd[0]} is a link or a device, not a file: it is not unpacked")
            if not all(str(name).isprintable() for name in names):
                raise ValueError("it holds a name with control characters: it is not unpacked")
            if any(name.is_absolute() or ".." in name.parts or not name.parts for name in names):
                raise ValueError("it holds a path that leads out of it: it is not unpacked")
            if len(set(names)) < len(names):
                raise ValueError("it holds two files of one name: it is not unpacked")
            if (total := sum(entry.file_size for entry in file.infolist())) > LARGEST:
                raise ValueError(f"it holds {total / 2**30:.1f} GiB, and no bundle has over 4: it is not unpacked")
            if (bad := file.testzip()) is not None:
                raise ValueError(f"{bad} is damaged; copy or download the zip again")
            if odd := [entry.filename for entry in file.infolist() if set(extras(file, entry)) - HARMLESS]:
                raise ValueError(f"{odd[0]} has a second name or more than a file needs: it is not unpacked")
            if not is_dense(file):
                raise ValueError("it holds bytes that are of none of its files: it is not unpacked")
            extract(file, into)
    except UnicodeDecodeError:
        raise ValueError("it holds a name that is not UTF-8: it is not unpacked") from None
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError) as error:
        raise ValueError(f"it cannot be read as a zip: {error}; copy or download it again") from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or an unknown compression method
        raise ValueError(f"this program cannot read such a zip: {error}") from None
    folders = {name.parts[0] for name in names}
    folder = into / min(folders, default="")
    if len(folders) != 1 or not folder.is_dir():
        what = "one file" if len(folders) == 1 else len(folders)
        raise ValueError(f"it is no bundle: of files and folders at its top there has to be one folder, not {what}")
    return folder


def is_dense(file: zipfile.ZipFile) -> bool:
    """Return whether the files follow one another up to the list at the end, and nothing comes after that list.

    Other programs may take bytes between files for further files. A file's sizes may follow it if the program that
    packed the zip streamed it.
    """
    assert file.fp is not None
    end = 0
    for entry in sorted(file.infolist(), key=lambda each: each.header_offset):
        if entry.header_offset - end not in ((0, *_STREAMED) if end else (0,)):
            return False
        file.fp.seek(entry.header_offset)
        _, _, flags, method, _, _, crc, packed, _, name, extra = struct.unpack("<4s5H3L2H", file.fp.read(30))
        if not (flags & _STREAMS or packed == 0xFFFFFFFF or (crc, packed) == (entry.CRC, entry.compress_size)):
            return False
        if method != entry.compress_type:
            return False
        end = entry.header_offset + 30 + name + extra + entry.compress_size
    size = os.fstat(file.fp.fileno()).st_size
    file.fp.seek(size - 22 - len(file.comment))
    return file.start_dir - end in (0, *_STREAMED) and file.fp.read(4) == b"PK\5\6"


def extras(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Iterator[int]:
    """Yield the kinds of an entry's extra fields, both in the list at the zip's end and in front of the file itself.

    Such a field can give the file another name for programs that read it. A malformed field yields -1.
    """
    assert file.fp is not None
    file.fp.seek(entry.header_offset + 26)
    name, extra = struct.unpack("<HH", file.fp.read(4))
    file.fp.seek(name, os.SEEK_CUR)
    for data in (entry.extra, file.fp.read(extra)):
        at = 0
        while at < len(data):
            kind, size = struct.unpack_from("<HH", data, at) if at + 4 <= len(data) else (-1, len(data))
            yield kind
            at += 4 + size


def extract(file: zipfile.ZipFile, into: Path) -> None:
    """Extract all entries; raise ValueError that names an entry that cannot be written (a bad name, or the disk)."""
    for entry in file.infolist():
        try:
            file.extract(entry, into)
        except OSError as error:
            name = entry.filename if len(entry.filename) < 80 else f"{entry.filename[:80]}..."
            raise ValueError(f"{name} cannot be unpacked: {error.strerror or error}") from None
