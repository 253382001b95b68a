"""Linear layers that adapters may change, by the names of --lora-target-modules. Imports no torch.

Like PEFT's ``target_modules``, names are suffixes of module names, at a dot: "q_proj" means that of each layer's
attention, "mlp.gate_proj" only those of MLPs. Names of checkpoints, of transformers' classes, and of layers that some
checkpoints fuse ("qkv_proj") are accepted. "experts" means all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pillion.engine.models.families import FAMILIES, layers_of
from pillion.engine.models.layer_operations import MATRICES, LayerTensor, tensors_of
from pillion.engine.models.model_config import ModelConfig
from pillion.engine.models.model_family import ModelFamily
from pillion.errors import ConfigError

FLAG = "--lora-target-modules"
EVERY = "all"
# Outputs that adapters may change, by name of the fused layer, such as "layers.3.qkv".
TargetedOutputs = dict[str, list[range]]


def listed_targets(values: Sequence[str]) -> tuple[str, ...]:
    """Split the flag's comma-separated values into names; () for all linear layers."""
    names = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    return () if EVERY in names else names


def targeted_outputs(model: ModelConfig, targets: Sequence[str]) -> TargetedOutputs:
    """Return the outputs that adapters limited to ``targets`` (not empty) may change. Raises ConfigError for a name
    without a linear layer in the model."""
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
    """Return whether adapters may change all of these outputs of a fused layer."""
    return sum(len(range(max(one.start, outputs.start), min(one.stop, outputs.stop))) for one in targeted) == len(
        outputs
    )


def _named(family: ModelFamily, tensor: LayerTensor, index: int) -> Iterator[tuple[range, set[str]]]:
    """Yield the outputs of each piece of a tensor, and all names of linear layers that produce them."""
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
    """Return a layer tensor's names in a family's checkpoints and in transformers' class; of per-expert names the
    first."""
    in_files = family.in_files(f"model.layers.{index}.{name}".replace("{}", "0"))
    return in_files, family.in_models(in_files)
