"""Unpack a zip whose author is not known: what other programs would read otherwise, or write elsewhere, is refused."""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

REGULAR = (0, stat.S_IFREG, stat.S_IFDIR)  # types of an entry; 0 where the program that packed it says none
# Extra fields of an entry: sizes over 4 GiB, and times and owners, which other programs add.
HARMLESS = {0x0001, 0x000A, 0x5455, 0x5855, 0x7855, 0x7875}
LARGEST = 4 << 30  # bytes that are unpacked; a bundle of all profiles has less than a twentieth of it
_STREAMS = 1 << 3  # flag of an entry: its sizes come after it
_STREAMED = (12, 16, 20, 24)  # so many bytes of them


def unpack(bundle: Path, into: Path) -> Path:
    """The one folder that the zip holds. ValueError, to which the caller adds the zip's name, for what is no bundle or
    holds paths that lead out of it."""
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
    except (RuntimeError, NotImplementedError) as error:  # encrypted, or compressed in another way
        raise ValueError(f"this program cannot read such a zip: {error}") from None
    folders = {name.parts[0] for name in names}
    folder = into / min(folders, default="")
    if len(folders) != 1 or not folder.is_dir():
        what = "one file" if len(folders) == 1 else len(folders)
        raise ValueError(f"it is no bundle: of files and folders at its top there has to be one folder, not {what}")
    return folder


def is_dense(file: zipfile.ZipFile) -> bool:
    """Whether the files follow one another, up to the list at the end, and nothing comes after it: what lies between
    them, other programs may take for files. Sizes may follow a file, where the program that packed it streamed."""
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
    """Kinds of the extra fields of an entry, in the list at the zip's end and in front of the file itself: one can name
    the file anew, for programs that heed it. -1 for what is none."""
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
    """All of it. ValueError names the entry that cannot be written: what is wrong is its name, or the disk."""
    for entry in file.infolist():
        try:
            file.extract(entry, into)
        except OSError as error:
            name = entry.filename if len(entry.filename) < 80 else f"{entry.filename[:80]}..."
            raise ValueError(f"{name} cannot be unpacked: {error.strerror or error}") from None
