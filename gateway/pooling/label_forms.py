"""Says what a classifier's labels are called, and how its logits become probabilities.

    problem_type                    a label's probability
    single_label_classification     softmax over all labels; with one label its sigmoid
    multi_label_classification      the label's own sigmoid
    regression                      none: the logit itself is the value
    (not said)                      as single_label_classification

That is how vLLM reads config.json, whose `id2label` names the labels.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pillion.engine.models.config_parser import is_encoder, labels_of
from pillion.errors import ConfigError, Internal
from pillion.gateway.pooling.pooling_files import Vector, read_json
from pillion.gateway.pooling.pooling_rows import LAST_ROW, Pooling, PoolingRows

MAX_LABEL_CHARS = 512


class Activation(enum.Enum):
    """Says how logits become values, by the name that config.json has for it."""

    SOFTMAX = "single_label_classification"
    SIGMOID = "multi_label_classification"
    NONE = "regression"


@dataclass(frozen=True, slots=True)
class LabelForm:
    """Describes a classifier.

    Attributes:
        labels: the names of its labels, in the order of its logits; none for a model that is no classifier.
        activation: how its logits become probabilities.
        rows: what a request's row is: the logits of all labels.
    """

    labels: tuple[str, ...] = ()
    activation: Activation = Activation.SOFTMAX
    rows: PoolingRows = LAST_ROW

    def values(self, row: Vector, activated: bool) -> Vector:
        """Returns the probabilities [labels] of a row of logits, or these themselves. Raises Internal for a row of
        another length than there are labels."""
        if len(row) != len(self.labels):
            raise Internal(f"a worker of another version gave {len(row)} numbers for {len(self.labels)} labels")
        if not activated or self.activation is Activation.NONE:
            return row
        if self.activation is Activation.SIGMOID or len(row) == 1:
            return np.array([sigmoid(float(logit)) for logit in row], np.float32)
        logits = row.astype(np.float64)
        parts = np.exp(logits - logits.max())
        shares: Vector = (parts / parts.sum()).astype(np.float32)
        return shares


def sigmoid(logit: float) -> float:
    """Returns 1 / (1 + exp(-logit)), which is computed so that nothing overflows."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    grown = math.exp(logit)
    return grown / (1.0 + grown)


def read_label_form(folder: Path) -> LabelForm:
    """Reads the config.json of a model's folder. Raises ConfigError for a model that is no classifier, and, by its
    name, for what is not supported."""
    config, path = read_json(folder / "config.json", {}), folder / "config.json"
    count = labels_of(config)
    if not count:
        raise ConfigError(f"{path}: its architecture has no head that tells labels apart")
    named = config.get("problem_type") or Activation.SOFTMAX.value
    if named not in [one.value for one in Activation]:
        raise ConfigError(f"{path}: problem_type {named!r} is not supported")
    return LabelForm(_names(path, config.get("id2label"), count), Activation(named), label_rows(config))


def label_rows(config: Mapping[str, Any]) -> PoolingRows:
    """Returns which positions of a text a classifier reads its labels from: the first token or the mean of all in an
    encoder, and in a decoder the last token that is no padding."""
    if is_encoder(config):
        return PoolingRows(pooling=Pooling.MEAN if config.get("classifier_pooling") == "mean" else Pooling.CLS)
    padding = config.get("pad_token_id")
    return PoolingRows(padding_id=padding if type(padding) is int else None)


def _names(path: Path, named: Any, count: int) -> tuple[str, ...]:
    """Returns the labels' names: those of id2label, and transformers' own for labels that it does not name."""
    known = named if isinstance(named, dict) else {}
    names = [known.get(str(number), f"LABEL_{number}") for number in range(count)]
    if not all(isinstance(name, str) and len(name) <= MAX_LABEL_CHARS for name in names):
        raise ConfigError(f"{path}: id2label has names that are no texts of at most {MAX_LABEL_CHARS} characters")
    return tuple(names)
