"""A batch claimed by this process, from its lock to its outputs. All functions block.

    lock --> check the input --> read the journal, cut its torn end --> append results --> outputs --> remove journal

The process may be killed at any moment. A journal entry is whole or absent; outputs are made from the journal under
names derived from the batch, so writing them again replaces them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader

import msgspec

from pillion.gateway.batches.batch_folder import (
    ERRORS,
    OUTPUT,
    OUTPUT_PURPOSE,
    PIECE_BYTES,
    BatchFolder,
    disk_full_errors,
    open_new,
    replace_file,
    write_all,
)
from pillion.gateway.batches.batch_lines import BatchLine, InputCheck, JournalEntry, read_request, whole_entries
from pillion.gateway.batches.batch_records import BatchRecord


@dataclass(eq=False)
class BatchClaim:
    """A batch that only this process runs, until ``close``. Created by :func:`claim`."""

    _folder: BatchFolder
    record: BatchRecord
    _lock: int

    def __post_init__(self) -> None:
        self._path = self._folder.batch_path(self.record.id)
        self._input: BufferedReader | None = None
        self._journal = -1
        self._spans: dict[int, tuple[int, int]] = {}

    def check_input(self, check: InputCheck, max_line_bytes: int) -> bool:
        """Check the next PIECE_BYTES of the input; return whether there is more. Raises FileNotFoundError if the input
        was removed."""
        if self._input is None:
            self._input = self._folder.content(self.record.input_file_id).open("rb")
        end = self._input.tell() + PIECE_BYTES
        while self._input.tell() < end:
            # Its end, and one byte more than allowed, which shows that the line is too long.
            line = self._input.readline(max_line_bytes + 2)
            if line:
                check.add(line)
            if not line or check.exhausted or len(line) > max_line_bytes + 1:
                self._spans = check.spans
                return False
        return True

    def replay(self) -> list[tuple[int, bool]]:
        """Open the journal. Return the number of each finished line, and whether its result is an error."""
        done, size = [], 0
        with disk_full_errors():
            self._journal = os.open(self._path / "journal", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with (self._path / "journal").open("rb") as entries:
            for entry, length in whole_entries(entries):
                done.append((entry.number, entry.failed))
                size += length
        os.ftruncate(self._journal, size)
        return done

    def line(self, number: int) -> BatchLine:
        """Return a line of the checked input."""
        assert self._input is not None
        begin, size_bytes = self._spans[number]
        return read_request(os.pread(self._input.fileno(), size_bytes, begin))

    def append(self, entries: Sequence[JournalEntry]) -> None:
        """Append results to the journal. From then on they survive this process; from :meth:`save` on, a power loss.
        Raises FolderFull; then the caller closes the claim, because the journal's end may be torn."""
        with disk_full_errors():
            write_all(self._journal, b"".join(entry.encoded() for entry in entries))

    def save(self, record: BatchRecord) -> None:
        """Store the batch's record, unless it is unchanged; with fsync, after all results, if the status is new."""
        if record == self.record:
            return
        new_status = record.status != self.record.status
        with disk_full_errors():
            if self._journal >= 0:
                os.fdatasync(self._journal)
            replace_file(self._path / "batch.json", msgspec.json.encode(record), sync=new_status)
        self.record = record

    def cancel_requested(self) -> bool:
        """Return whether a client has cancelled the batch."""
        return (self._path / "cancel").exists()

    def write_outputs(self, unserved: Iterator[bytes]) -> tuple[str | None, str | None]:
        """Write the files of answers and of errors, followed by the lines of ``unserved``; return their ids, None for
        an empty file. Raises FolderFull."""

        def lines(failed: bool) -> Iterator[bytes]:
            with (self._path / "journal").open("rb") as entries:
                for entry, _ in whole_entries(entries):
                    if entry.failed is failed:
                        yield entry.line
            if failed:
                yield from unserved

        return self._write_output(OUTPUT, lines(failed=False)), self._write_output(ERRORS, lines(failed=True))

    def finish(self, record: BatchRecord) -> None:
        """Store the record of a finished batch and remove its journal."""
        self.save(record)
        (self._path / "journal").unlink(missing_ok=True)

    def close(self) -> None:
        """Release the batch, so that another gateway can continue it. Idempotent."""
        if self._input is not None:
            self._input.close()
        for file in (self._journal, self._lock):
            if file >= 0:
                os.close(file)
        self._journal = self._lock = -1

    def _write_output(self, kind: str, lines: Iterator[bytes]) -> str | None:
        name = f"file-{self.record.id.removeprefix('batch_')}{kind}"
        part = self._folder.content(name).with_suffix(".part")
        first = next(lines, None)
        if first is None:
            return None
        with disk_full_errors():
            file = open_new(part)
            try:
                with open(file, "wb", buffering=PIECE_BYTES, closefd=False) as out:
                    out.write(first + b"\n")
                    out.writelines(line + b"\n" for line in lines)
                filename, seconds = f"{self.record.id}{kind}.jsonl", self.record.output_seconds
                self._folder.publish_file(file, part, name, self.record.tenant, filename, OUTPUT_PURPOSE, seconds)
            finally:
                os.close(file)
                part.unlink(missing_ok=True)
        return name


def claim(folder: BatchFolder, name: str) -> BatchClaim | None:
    """Claim a batch; None if another process has it, or it has ended. Raises OSError."""
    lock = folder.lock(name)
    if lock is None:
        return None
    # Read only under the lock: until then another process may have written it.
    record = folder.find_batch(name)
    if record is None or record.over:
        os.close(lock)
        return None
    return BatchClaim(folder, record, lock)
