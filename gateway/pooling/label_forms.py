"""Names of a classifier's labels, and the activation of its logits.

    problem_type                    the value of a label
    single_label_classification     softmax over all labels; with a single label, its sigmoid
    multi_label_classification      sigmoid of the label's logit
    regression                      the logit
    (absent)                        as single_label_classification

All of it, as in vLLM, by config.json, whose `id2label` names the labels.
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
    """Function from logits to a classifier's values, by its problem_type in config.json."""

    SOFTMAX = "single_label_classification"
    SIGMOID = "multi_label_classification"
    NONE = "regression"


@dataclass(frozen=True, slots=True)
class LabelForm:
    """How a classifier's labels follow from its logits.

    Attributes:
        labels: names in the order of the logits; none for a model that is no classifier.
        activation: function from logits to probabilities.
        rows: rows of a text that the logits are computed from.
    """

    labels: tuple[str, ...] = ()
    activation: Activation = Activation.SOFTMAX
    rows: PoolingRows = LAST_ROW

    def values(self, row: Vector, activated: bool) -> Vector:
        """Return the probabilities [labels] of a row of logits [labels]; the logits if not ``activated``, or for a
        regression. Raises Internal for a row of another length."""
        if len(row) != len(self.labels):
            raise Internal(f"a worker of another version returned {len(row)} numbers for {len(self.labels)} labels")
        if not activated or self.activation is Activation.NONE:
            return row
        if self.activation is Activation.SIGMOID or len(row) == 1:
            return np.array([sigmoid(float(logit)) for logit in row], np.float32)
        logits = row.astype(np.float64)
        exps = np.exp(logits - logits.max())
        probabilities: Vector = (exps / exps.sum()).astype(np.float32)
        return probabilities


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)) without overflow."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    exp = math.exp(logit)
    return exp / (1.0 + exp)


def read_label_form(folder: Path) -> LabelForm:
    """Read the label form from config.json in a model's folder. Raises ConfigError for a model that is no classifier,
    and for unsupported settings, by name."""
    config, path = read_json(folder / "config.json", {}), folder / "config.json"
    count = labels_of(config)
    if not count:
        raise ConfigError(f"{path}: its architecture has no classification head")
    problem = config.get("problem_type") or Activation.SOFTMAX.value
    if problem not in [one.value for one in Activation]:
        raise ConfigError(f"{path}: problem_type {problem!r} is not supported")
    return LabelForm(_names(path, config.get("id2label"), count), Activation(problem), label_rows(config))


def label_rows(config: Mapping[str, Any]) -> PoolingRows:
    """Return the rows of a text that a classifier pools: an encoder's first or all, a decoder's last one that is not
    padding."""
    if is_encoder(config):
        return PoolingRows(pooling=Pooling.MEAN if config.get("classifier_pooling") == "mean" else Pooling.CLS)
    padding = config.get("pad_token_id")
    return PoolingRows(padding_id=padding if type(padding) is int else None)


def _names(path: Path, id2label: Any, count: int) -> tuple[str, ...]:
    """Return the names of ``count`` labels: those in ``id2label``, else transformers' defaults."""
    known = id2label if isinstance(id2label, dict) else {}
    names = [known.get(str(number), f"LABEL_{number}") for number in range(count)]
    if not all(isinstance(name, str) and len(name) <= MAX_LABEL_CHARS for name in names):
        raise ConfigError(f"{path}: id2label has names that are not texts of at most {MAX_LABEL_CHARS} characters")
    return tuple(names)
