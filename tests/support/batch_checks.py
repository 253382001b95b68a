"""Consistency checks of a batch folder, valid at any moment."""

from __future__ import annotations

import msgspec

from pillion.gateway.batches.batch_folder import BatchFolder
from pillion.gateway.batches.batch_lines import whole_entries
from pillion.gateway.batches.batch_records import FileRecord


def check_batches(folder: BatchFolder) -> None:
    """Raise AssertionError if records, files, journals and outputs are inconsistent."""
    records = (folder.path / "files").glob("*.json")
    known = {path.stem: msgspec.json.decode(path.read_bytes(), type=FileRecord) for path in records}
    for name, file in known.items():
        assert file.id == name, f"the record of {name} is of {file.id}"
        size = folder.content(name).stat().st_size
        assert size == file.bytes, f"{name} has another size than its record says"
    for name in folder.batch_ids():
        batch = folder.find_batch(name)
        assert batch is not None, f"the record of {name} cannot be read"
        assert batch.completed + batch.failed <= max(batch.total, 0), f"{name} counts more lines than it has"
        journal = folder.batch_path(name) / "journal"
        if batch.over:
            for output, lines in ((batch.output_file_id, batch.completed), (batch.error_file_id, batch.failed)):
                if output in known:
                    found = folder.content(output).read_bytes().count(b"\n")
                    assert found == lines, f"{output} has {found} lines, not {lines}"
        elif journal.exists():
            with journal.open("rb") as entries:
                numbers = [entry.number for entry, _ in whole_entries(entries)]
            assert len(numbers) == len(set(numbers)), f"the journal of {name} has a line twice"
