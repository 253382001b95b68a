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
# Outputs that adapters may change, by name of the fused layer, such as "layers.3.qkv".
TargetedOutputs = dict[str, list[range]]


def listed_targets(values: Sequence[str]) -> tuple[str, ...]:
    """Split the flag's comma-separated values into names; () for all linear layers."""
    names = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    return () if "all" in names else names


def targeted_outputs(model: ModelConfig, targets: Sequence[str]) -> TargetedOutputs:
    """Return the outputs of a model that adapters limited to ``targets`` (not empty) may change. Raises ConfigError for
    a target that matches no linear layer."""
    family, targeted, unmatched = FAMILIES[model.family], TargetedOutputs(), set(targets)
    for index, layer in enumerate(layers_of(model)):
        for tensor in tensors_of(layer):
            if tensor.role in MATRICES:
                for outputs, names in _names_by_outputs(family, tensor, index):
                    matching = {target for target in targets for name in names if f".{name}".endswith(f".{target}")}
                    unmatched -= matching
                    if matching:
                        targeted.setdefault(f"layers.{index}.{tensor.name}", []).append(outputs)
    if unmatched:
        raise ConfigError(f"{FLAG}: no linear layer of a {model.family} model is called {min(unmatched)}")
    return targeted


def are_targets(outputs: range, targeted: Sequence[range]) -> bool:
    """Return whether all of ``outputs`` are in ``targeted``, disjoint ranges of outputs of the same fused layer."""
    common = (range(max(other.start, outputs.start), min(other.stop, outputs.stop)) for other in targeted)
    return sum(map(len, common)) == len(outputs)


def _names_by_outputs(family: ModelFamily, tensor: LayerTensor, index: int) -> Iterator[tuple[range, set[str]]]:
    """Yield the outputs of each projection in a fused layer, and all names of linear layers that contain them."""
    first = 0
    for number, entries in enumerate(tensor.rows):
        modules = {
            module
            for names in tensor.checkpoint_names
            for module, covered in zip(names, tensor.pieces_of(names), strict=True)
            if covered.start <= number < covered.stop
        }
        full_names = {name for module in modules for name in _full_names(family, index, f"{module}.weight")}
        full_names = {name.removesuffix(".weight") for name in full_names}
        if tensor.experts:
            full_names |= {name.rpartition(".0.")[0] for name in full_names}
            stacked = {full for name in tensor.stacked for full in _full_names(family, index, name)}
            full_names |= stacked | {name.rpartition(".")[0] for name in stacked}
        yield range(first, first + entries.size), full_names
        first += entries.size


def _full_names(family: ModelFamily, index: int, name: str) -> tuple[str, str]:
    """Return the names of tensor ``name`` of layer ``index`` in a family's checkpoints and in transformers' class; for
    experts, those of expert 0."""
    in_files = family.in_files(f"model.layers.{index}.{name}".replace("{}", "0"))
    return in_files, family.in_models(in_files)
