"""Signatures of thinking blocks whose text is omitted: they encode the text.

A client sends a thinking block back unchanged. Without its text, the next prompt would not start with the answer in
the prefix cache, and the model would not see why it called a tool. So, as at Anthropic, the signature contains the
text. It is encoded, not encrypted: the client could have requested the text.
"""

from __future__ import annotations

import base64

# Not a prefix of Anthropic's signatures: base64 has no period.
_MARK = "pillion."


def signature_of(thoughts: str) -> str:
    """Encode ``thoughts`` as a signature."""
    return _MARK + base64.b64encode(thoughts.encode()).decode()


def signed_thoughts(signature: str) -> str | None:
    """Decode a signature; None for one of another server. Raises ValueError for a modified one."""
    if not signature.startswith(_MARK):
        return None
    return base64.b64decode(signature[len(_MARK) :], validate=True).decode()
