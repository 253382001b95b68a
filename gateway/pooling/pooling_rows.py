"""Which rows of a text make its vector, by the model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pillion.types import PoolingParams


class Pooling(StrEnum):
    """Names the rows whose mean is the vector of a text, as sentence-transformers does: that of its first token, all of
    them, or that of its last token."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "lasttoken"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRows:
    """How a model's texts become vectors.

    Attributes:
        pooling: the rows whose mean is the vector.
        logits_of: the tokens whose logits after the last token are the vector; () for the hidden state itself.
        padding_id: a token that does not count as the last one, in classifiers; None where each counts.
    """

    pooling: Pooling = Pooling.LAST
    logits_of: tuple[int, ...] = ()
    padding_id: int | None = None

    @property
    def uses_prefixes(self) -> bool:
        """Says whether cached prefixes are used: they have no rows but the last token's."""
        return self.pooling is Pooling.LAST

    def params(self, prompt: tuple[int, ...], second_from: int = 0) -> PoolingParams:
        """Return the parameters for a prompt; ``second_from`` is that of PoolingParams."""
        return PoolingParams(rows=self._positions(prompt), logits_of=self.logits_of, second_from=second_from)

    def _positions(self, prompt: tuple[int, ...]) -> range | None:
        match self.pooling:
            case Pooling.MEAN:
                return range(len(prompt))
            case Pooling.CLS:
                return range(1)
        last = len(prompt) - 1
        while last > 0 and prompt[last] == self.padding_id:
            last -= 1
        # A text of padding alone has the row of its first token; transformers takes that one, too.
        last = 0 if prompt[last] == self.padding_id else last
        return None if last == len(prompt) - 1 else range(last, last + 1)


# The vector of a text is by default that of its last token.
LAST_ROW = PoolingRows()
