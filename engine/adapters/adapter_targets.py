"""Says which linear layers adapters may change, by the names of --lora-target-modules. Imports no torch.

PEFT's ``target_modules`` are the ends of modules' names, at a point: "q_proj" is that of each layer's attention, and
"mlp.gate_proj" that of MLPs alone. The names are those of checkpoints, of transformers' classes, and those of layers
that some checkpoints hold fused ("qkv_proj"). All experts of a layer are "experts".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pillion.engine.models.families import FAMILIES, ModelFamily, layers_of
from pillion.engine.models.layer_operations import MATRICES, LayerTensor, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.errors import ConfigError

FLAG = "--lora-target-modules"
# This name stands for all linear layers.
EVERY = "all"
# The outputs of each fused layer that adapters may change, by its name, such as "layers.3.qkv".
TargetedOutputs = dict[str, list[range]]


def listed_targets(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the names in the values of the flag, which commas part; () where they mean all linear layers."""
    names = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    return () if EVERY in names else names


def targeted_outputs(model: ModelConfig, targets: Sequence[str]) -> TargetedOutputs:
    """Returns which outputs adapters may change that are limited to ``targets``, one or more names. Raises ConfigError
    where a name means no linear layer of the model."""
    family, found, left = FAMILIES[model.family], TargetedOutputs(), set(targets)
    for index, layer in enumerate(layers_of(model)):
        for tensor in tensors_of(layer):
            if tensor.role in MATRICES:
                for outputs, names in _named(family, tensor, index):
                    meant = {target for target in targets for name in names if f".{name}".endswith(f".{target}")}
                    left -= meant
                    if meant:
                        found.setdefault(f"layers.{index}.{tensor.name}", []).append(outputs)
    if left:
        raise ConfigError(f"{FLAG}: no linear layer of a {model.family} model is called {min(left)}")
    return found


def are_targets(outputs: range, targeted: Sequence[range]) -> bool:
    """Says whether adapters may change all of these outputs of a fused layer, by those that they may change."""
    return sum(len(range(max(one.start, outputs.start), min(one.stop, outputs.stop))) for one in targeted) == len(
        outputs
    )


def _named(family: ModelFamily, tensor: LayerTensor, index: int) -> Iterator[tuple[range, set[str]]]:
    """Yields the outputs of each piece of a tensor, and all names of linear layers that make them."""
    first = 0
    for number, piece in enumerate(tensor.rows):
        own = {
            module
            for names in tensor.checkpoint_names
            for module, pieces in zip(names, tensor.pieces_of(names), strict=True)
            if pieces.start <= number < pieces.stop
        }
        called = {name for module in own for name in _full(family, index, f"{module}.weight")}
        called = {name.removesuffix(".weight") for name in called}
        if tensor.experts:
            called |= {name.rpartition(".0.")[0] for name in called}
            stacked = {name for each in tensor.stacked for name in _full(family, index, each)}
            called |= stacked | {name.rpartition(".")[0] for name in stacked}
        yield range(first, first + piece.size), called
        first += piece.size


def _full(family: ModelFamily, index: int, name: str) -> tuple[str, str]:
    """Returns the names that a tensor of a layer has in a family's checkpoints and in transformers' class; where
    experts have one each, that of the first one."""
    in_files = family.in_files(f"model.layers.{index}.{name}".replace("{}", "0"))
    return in_files, family.in_models(in_files)
