"""Folders of checkpoints: a step each, that is whole or is not there. Pure; imports no torch.

[Note: whole checkpoints]
A checkpoint is written into `step-00000100.part`. When all its files are on the disk, a manifest
with the size and the SHA-256 of each is written, then the folder gets its name in one operation.
What a kill leaves is a `.part`, which is never read and goes with the next save. A step that is
saved again takes the place of the older one, which is called `.old` between two renames and is
found under this name if a kill comes there. What is to be deleted becomes a `.part` first.
Checkpoints count by the order in which they were saved: who goes back to step 5 and saves step 6
continues from this one, though a step 20 lies beside it.
The digests find what disks and copies did to a file. They do not prove who wrote it: whoever can
write the files can write a manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d{8,18})(\.old)?")
_PART, _OLD = ".part", ".old"
_LARGEST_MANIFEST = 1 << 26  # bytes; that of 16,384 ranks has 2 MB


class NotWholeError(ValueError):
    """A checkpoint cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file was when it was written."""

    size: int
    sha256: str

    @staticmethod
    def of(content: bytes) -> FileRecord:
        """Return the record of a file with this content."""
        return FileRecord(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: Of the training.
        order: How many checkpoints were saved before into this folder, at least.
        ranks: How many saved it.
        apart: Keys of what each rank saved for itself.
        files: By name.
    """

    step: int
    order: int
    ranks: int
    apart: tuple[str, ...]
    files: Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True)
class StepFolder:
    """A folder that is called as a checkpoint.

    Attributes:
        name: Of the folder.
        step: As its name says.
        manifest: None where it has none that can be read.
        complaint: Then what is wrong.
    """

    name: str
    step: int
    manifest: Manifest | None
    complaint: str = ""


def step_name(step: int) -> str:
    """Return what the folder of a step is called."""
    return f"step-{step:08}"


def part_of(folder: Path, step: int) -> Path:
    """Return where a step is written before it is whole."""
    return folder / (step_name(step) + _PART)


def step_folders(folder: Path) -> list[StepFolder]:
    """Return the checkpoints of a folder, what was saved last first; empty where there is none.

    Those without a readable manifest come last, the largest step first.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if (match := _NAME.fullmatch(path.name)) and path.is_dir():
            try:
                manifest, complaint = read_manifest(path), ""
            except NotWholeError as error:
                manifest, complaint = None, str(error)
            found.append(StepFolder(path.name, int(match[1]), manifest, complaint))
    return sorted(found, key=_newest_first)


def _newest_first(each: StepFolder) -> tuple[bool, int, bool]:
    number = each.step if each.manifest is None else each.manifest.order
    return each.manifest is None, -number, each.name.endswith(_OLD)


# -- manifests -------------------------------------------------------------------------------------


def record_of(path: Path) -> FileRecord:
    """Return size and digest of a file as it is."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, onto the disk."""
    files = {name: [record.size, record.sha256] for name, record in manifest.files.items()}
    content = {
        "format": _FORMAT,
        "step": manifest.step,
        "order": manifest.order,
        "ranks": manifest.ranks,
        "apart": list(manifest.apart),
        "files": files,
    }
    with (path / MANIFEST).open("w") as file:
        json.dump({"sha256": _digest(content), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        NotWholeError: There is none, or it is not as it was written.
    """
    file = path / MANIFEST
    try:
        if (size := file.stat().st_size) > _LARGEST_MANIFEST:
            raise NotWholeError(f"{MANIFEST} has {size:,} bytes, more than any can have")
        whole = json.loads(file.read_text())
        content = whole["content"]
        if whole["sha256"] != _digest(content):
            raise NotWholeError(f"{MANIFEST} has other bytes than were written")
    except FileNotFoundError:
        raise NotWholeError(
            f"{MANIFEST} is missing: not written by sharding.checkpoint.save, or not to its end"
        ) from None
    except NotWholeError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise NotWholeError(f"{MANIFEST} cannot be read: {type(error).__name__}: {error}") from None
    if content.get("format") != _FORMAT:
        raise NotWholeError(
            f"{MANIFEST} has format {content.get('format')!r}, expected {_FORMAT}: load with the "
            "version that wrote it"
        )
    if outside := [name for name in content["files"] if not _is_plain(name)]:
        raise NotWholeError(f"{MANIFEST} names {outside[0]!r}, which is no file of its folder")
    return Manifest(
        step=content["step"],
        order=content["order"],
        ranks=content["ranks"],
        apart=tuple(content["apart"]),
        files={name: FileRecord(*record) for name, record in content["files"].items()},
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_plain(name: str) -> bool:
    """Return whether a name stays in its folder."""
    return name == os.path.basename(name) and name not in ("", ".", "..", MANIFEST)


def misfits(path: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Return which files are missing, no files, or of another size; opens none."""
    wrong = []
    for name, record in files.items():
        try:
            found = (path / name).lstat()
        except OSError:
            wrong.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(found.st_mode):
            wrong.append(f"{name} is no regular file")
        elif found.st_size != record.size:
            wrong.append(f"{name} has {found.st_size:,} bytes, expected {record.size:,}")
    return wrong


def changed(path: Path, files: Iterable[tuple[str, FileRecord]]) -> list[str]:
    """Return which files have other bytes than were written; reads them all."""
    wrong = []
    for name, record in files:
        try:
            found = record_of(path / name)
        except OSError as error:
            wrong.append(f"{name} cannot be read: {error}")
            continue
        if found != record:
            wrong.append(
                f"{name} has other bytes than were written: SHA-256 {found.sha256[:12]}..., "
                f"expected {record.sha256[:12]}..."
            )
    return wrong


def strangers(path: Path, manifest: Manifest) -> list[str]:
    """Return what lies in a checkpoint and is no part of it."""
    return sorted({p.name for p in path.iterdir()} - set(manifest.files) - {MANIFEST})


# -- rank 0 writes ---------------------------------------------------------------------------------


def begin_part(folder: Path, step: int) -> int:
    """Make the folder that a step is written into, without what an earlier try left.

    Returns:
        The order of the checkpoint.
    """
    part = part_of(folder, step)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return 1 + max((f.manifest.order for f in step_folders(folder) if f.manifest), default=0)


def put_in_place(part: Path) -> Path:
    """Give a written checkpoint its name; see [Note: whole checkpoints]."""
    place = part.with_name(part.name.removesuffix(_PART))
    old = place.with_name(place.name + _OLD)
    _to_disk(part)
    if place.exists():
        if old.exists():
            _discard(old)
        place.rename(old)
    part.rename(place)
    _to_disk(place.parent)
    return place


def delete_old(folder: Path, keep: int | None) -> None:
    """Delete all but the `keep` checkpoints that were saved last, and what kills left.

    What has no readable manifest is not known to be ours, and stays.
    """
    ours = [each for each in step_folders(folder) if each.manifest is not None]
    named = [each for each in ours if not each.name.endswith(_OLD)]
    replaced = {each.name + _OLD for each in named}
    gone = [each.name for each in ours if each.name in replaced]
    gone += [] if keep is None else [each.name for each in named[keep:]]
    for name in gone:
        _discard(folder / name)
    for path in folder.iterdir():
        name = path.name.removesuffix(_PART)
        if name != path.name and _NAME.fullmatch(name) and path.is_dir():
            shutil.rmtree(path)


def _discard(path: Path) -> None:
    """Delete a checkpoint that must not look whole while it is being deleted."""
    part = path.with_name(path.name + _PART)
    if part.exists():
        shutil.rmtree(part)
    path.rename(part)
    shutil.rmtree(part)


def _to_disk(folder: Path) -> None:
    """Have the names in a folder outlive a loss of power, where the file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
