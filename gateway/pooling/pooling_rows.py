"""Choice of the rows of a text that are pooled into its vector."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pillion.types import PoolingParams


class Pooling(StrEnum):
    """Rows whose mean is the vector of a text, by sentence-transformers' names: the first token's row, all rows, or the
    last token's row."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "lasttoken"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRows:
    """What a worker computes of each text.

    Attributes:
        pooling: the rows whose mean is the vector.
        logits_of: tokens whose logits after the last token are the vector; () for the hidden state.
        padding_id: a classifier's padding token, which does not count as last token; None for no padding.
    """

    pooling: Pooling = Pooling.LAST
    logits_of: tuple[int, ...] = ()
    padding_id: int | None = None

    @property
    def uses_prefixes(self) -> bool:
        """True if cached prefixes can be used: no rows of a prefix, which a cache does not have, are needed."""
        return self.pooling is Pooling.LAST

    def params(self, prompt: tuple[int, ...], second_from: int = 0) -> PoolingParams:
        """Return the parameters for a prompt; ``second_from`` as in PoolingParams."""
        return PoolingParams(rows=self._row_positions(prompt), logits_of=self.logits_of, second_from=second_from)

    def _row_positions(self, prompt: tuple[int, ...]) -> range | None:
        """Return the positions of the rows to pool; None for the prompt's last one."""
        match self.pooling:
            case Pooling.MEAN:
                return range(len(prompt))
            case Pooling.CLS:
                return range(1)
        last = len(prompt) - 1
        while last > 0 and prompt[last] == self.padding_id:
            last -= 1
        # All padding: use the first token's row, as transformers does.
        last = 0 if prompt[last] == self.padding_id else last
        return None if last == len(prompt) - 1 else range(last, last + 1)


LAST_ROW = PoolingRows()
