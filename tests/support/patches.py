"""The grammar of patches that Codex lets models write, and an equivalent regular expression."""

from __future__ import annotations

# Copied from Codex.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCHED = (
    r"\*{3} Begin Patch\n(\*{3} Add File: .+\n(\+.*\n)+|\*{3} Delete File: .+\n|\*{3} Update File: .+\n"
    r"(\*{3} Move to: .+\n)?(((@@|@@ .+|[-+ ].*)\n)+(\*{3} End of File\n)?)?)+\*{3} End Patch\n?"
)
