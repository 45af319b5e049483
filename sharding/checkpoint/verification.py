"""Which checkpoint is loaded: the newest that is whole on all ranks. Reads files, writes none.

Rank 0 lists them; all ranks look whether they see the same files, and read a share each to compare
its digest. Nothing is unpickled before.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from sharding.checkpoint.dcp_metadata import METADATA, parse_metadata
from sharding.checkpoint.messages import Messages
from sharding.checkpoint.step_folders import (
    FileRecord,
    Manifest,
    NotWholeError,
    StepFolder,
    changed,
    misfits,
    step_folders,
    strangers,
)


@dataclass(frozen=True, slots=True)
class VerifiedCheckpoint:
    """A checkpoint whose files are those that were written.

    Attributes:
        path: Of its folder.
        manifest: What it consists of.
        metadata: What lies where in the files.
    """

    path: Path
    manifest: Manifest
    metadata: Metadata


def whole_checkpoint(messages: Messages, folder: Path, step: int | None) -> VerifiedCheckpoint:
    """Return the checkpoint that was saved last and is whole, or that of a step. A collective.

    Raises:
        FileNotFoundError: There is none at all, or ranks see different files.
        ValueError: None is whole, or that of the step is not.
    """
    found = messages.together(
        lambda: None, lambda ranks: [step_folders(folder)] * len(ranks), f"look into {folder}"
    )
    asked = [each for each in found if step in (None, each.step)]
    if not asked:
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        there = f"those of steps {sorted(each.step for each in found)}" if found else "none"
        raise FileNotFoundError(f"expected {wanted} in {str(folder)!r}, found {there}")
    complaints: list[str] = []
    for each in asked:
        wrong = _wrong_with(messages, folder, each)
        if not wrong and each.manifest is not None:
            _tell(messages, folder / each.name, each, complaints, asked)
            return _opened(messages, folder / each.name, each.manifest)
        complaints.append(f"{each.name}: {'; '.join(wrong)}")
    raise ValueError(f"{str(folder)!r} has no whole checkpoint to load: {'. '.join(complaints)}")


def _opened(messages: Messages, path: Path, manifest: Manifest) -> VerifiedCheckpoint:
    metadata = messages.agree(lambda: _metadata(path, manifest), f"read {path}")
    return VerifiedCheckpoint(path, manifest, metadata)


def _wrong_with(messages: Messages, folder: Path, found: StepFolder) -> list[str]:
    """Return what is wrong with a checkpoint, the same on all ranks."""
    manifest = found.manifest
    if manifest is None:
        return [found.complaint]
    path = folder / found.name

    def look() -> tuple[list[str], list[str]]:
        missing = misfits(path, manifest.files)
        share = _share(manifest, messages.rank, messages.size)
        return missing, [] if missing else changed(path, share)

    def compare(by_rank: list[tuple[list[str], list[str]]]) -> list[list[str]]:
        of_first = by_rank[0][0]
        for rank, (missing, _) in enumerate(by_rank):
            if missing != of_first:
                raise FileNotFoundError(
                    f"{path}: rank {rank} sees other files than rank 0: "
                    f"{'; '.join(missing[:3]) or 'all of them'}, against "
                    f"{'; '.join(of_first[:3]) or 'all of them'}; load from a file system that "
                    "all ranks share"
                )
        return [[*of_first, *(each for _, wrong in by_rank for each in wrong)]] * len(by_rank)

    return messages.together(look, compare, f"verify {path}")


def _share(manifest: Manifest, rank: int, ranks: int) -> list[tuple[str, FileRecord]]:
    """Return the files that a rank reads to verify them; every file has one rank."""
    files = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
    return files[rank::ranks]


def _metadata(path: Path, manifest: Manifest) -> Metadata:
    content = (path / METADATA).read_bytes()
    if (record := manifest.files.get(METADATA)) is None or record.of(content) != record:
        raise NotWholeError(f"{path}: {METADATA} has other bytes than were written")
    return parse_metadata(content, manifest.files)


def _tell(
    messages: Messages,
    path: Path,
    found: StepFolder,
    complaints: Sequence[str],
    asked: Sequence[StepFolder],
) -> None:
    """Warn on rank 0 of newer checkpoints that cannot be loaded, and of what is not known."""
    if messages.rank:
        return
    newer = [
        f"{each.name}: {each.complaint}"
        for each in asked
        if each.manifest is None and each.step > found.step
    ]
    if complaints or newer:
        warnings.warn(
            f"loading {str(path)!r}, because what is newer is not whole: "
            f"{'. '.join([*complaints, *newer])}",
            stacklevel=4,
        )
    if found.manifest is not None and (unknown := strangers(path, found.manifest)):
        warnings.warn(
            f"{str(path)!r} holds {unknown[:4]}, which save did not write; they are not read",
            stacklevel=4,
        )
