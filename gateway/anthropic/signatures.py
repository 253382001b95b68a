"""Writes what an assistant thought into the signature of a thinking block whose text is left out, and reads it back.

A client sends a thinking block back as it came. Where the text were lost, the next prompt would not begin with the
answer that is in the prefix cache, and the model would not know why it called a tool. So the signature holds the text,
as it does at Anthropic's. The client may have asked for the text just as well, so it is spelled otherwise, not
encrypted.
"""

from __future__ import annotations

import base64

# No signature of Anthropic's begins so, because base64 has no period.
_MARK = "pillion."


def signature_of(thoughts: str) -> str:
    """Returns the signature that stands for ``thoughts``."""
    return _MARK + base64.b64encode(thoughts.encode()).decode()


def signed_thoughts(signature: str) -> str | None:
    """Returns the thoughts for which a signature stands; None for a signature of another server. Raises ValueError for
    one that was changed."""
    if not signature.startswith(_MARK):
        return None
    return base64.b64decode(signature[len(_MARK) :], validate=True).decode()
