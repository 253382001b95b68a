"""Loading of a decode worker's draft model, and the check that it can draft for its model."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillion.config import DecodeFlags, WorkerFlags
from pillion.engine.backends.backend import KVLayout, kv_layout
from pillion.engine.backends.cpu.cpu_loading import core_share, unsupported
from pillion.engine.backends.devices import resolve_device
from pillion.engine.backends.loaded_model import BackendFactory, LoadedModel
from pillion.engine.checkpoints.model_files import folder_of
from pillion.engine.checkpoints.prepare import prepare
from pillion.engine.drafts.draft_chains import DraftShape
from pillion.engine.drafts.draft_model import DraftModel, draft_blocks
from pillion.engine.models.config_parser import load_config
from pillion.errors import ConfigError
from pillion.host.cores import parse_cores
from pillion.kvstore.hashing import HASH_BYTES
from pillion.settings.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from pillion.engine.drafts.eagle_config import EagleConfig
    from pillion.engine.drafts.eagle_head import EagleBackend, HeadBackend

log = logging.getLogger("pillion.worker")

GPU_BLOCK_TOKENS = 128


def load_draft(
    flags: WorkerFlags,
    config: SpeculativeConfig,
    main: LoadedModel,
    threads: int,
    most_tokens: int,
    load: BackendFactory,
) -> tuple[DraftShape, DraftModel]:
    """Load the draft model ``config.model``, or an EAGLE-3 head, for the model ``main``, with its worker's flags;
    passes have up to ``most_tokens`` tokens. Raises ConfigError, with the draft model's name, if it cannot be loaded or
    has another vocabulary."""
    if config.method == "eagle3":
        return load_eagle_head(flags, config, main, threads, most_tokens)
    with _named(config.model):
        flags = config.model_flags(flags)
        prepared = prepare(flags, log.info)
        check_tokenizer(main.prepared.folder, prepared.folder)
        longest = min(main.prepared.max_model_len, load_config(prepared.folder).max_position_embeddings)
        # Only its sizes are used; its version may differ from the backend's.
        layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype)
        if layout.state_bytes:
            raise ConfigError("its layers have states, which draft models must not; choose one with attention only")
        most_block_tokens = GPU_BLOCK_TOKENS if resolve_device(flags) == "cuda" else 0
        blocks = draft_blocks(main.backend.layout, layout, most_block_tokens)
        flags = replace(flags, max_model_len=longest, block_size=flags.block_size * blocks)
        loaded = load(flags, threads)
        log.info("draft model %s: %d tokens in a slot", prepared.name, flags.block_size)
        backend = loaded.backend
        shape = DraftShape(
            namespace=loaded.namespace(),
            block_size=flags.block_size,
            vocab_size=backend.vocab_size,
            max_model_len=longest,
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_batched_tokens=most_tokens,
            original_tokens=loaded.prepared.original_tokens,
        )
        return shape, DraftModel(backend, main.backend.layout.block_bytes, main.backend.vocab_size)


def load_eagle_head(
    flags: WorkerFlags, config: SpeculativeConfig, main: LoadedModel, threads: int, most_tokens: int
) -> tuple[DraftShape, DraftModel]:
    """Load the EAGLE-3 head ``config.model``, and make ``main``'s backend return the hidden states that the head needs.
    Passes have up to ``most_tokens`` tokens. With tensor parallelism on CPUs, the head runs beside rank 0. Raises
    ConfigError, with the head's name, if it cannot be loaded or was made for another model."""
    # Imports torch, which a decode worker loads only with a model.
    from pillion.engine.drafts.eagle_config import load_eagle_config
    from pillion.engine.drafts.eagle_head import EagleModel, eagle_layout

    with _named(config.model):
        prepared, backend = main.prepared, main.backend
        on_gpu = resolve_device(flags) == "cuda"
        if on_gpu and flags.processes > 1:
            raise ConfigError(f"on GPUs EAGLE-3 heads run in workers of one process, not of {flags.processes}")
        folder = folder_of(config.model, config.revision)
        head = load_eagle_config(folder, load_config(prepared.folder))
        layout = eagle_layout(head, flags.block_size, prepared.dtype)
        blocks = draft_blocks(backend.layout, layout, GPU_BLOCK_TOKENS if on_gpu else 0)
        layout = replace(layout, block_size=flags.block_size * blocks)
        if on_gpu:
            own: HeadBackend = _gpu_head(flags, folder, head, layout, main, most_tokens)
        else:
            own = _eagle_backend(flags, folder, head, layout, main, threads)
        log.info("EAGLE-3 head %s: reads the inputs of layers %s", config.model, [*head.state_layers])
        shape = DraftShape(
            namespace=bytes(HASH_BYTES),
            block_size=layout.block_size,
            vocab_size=backend.vocab_size,
            max_model_len=prepared.max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_batched_tokens=most_tokens,
            reads_states=True,
        )
        return shape, EagleModel(own, backend.layout.block_bytes, backend.vocab_size)


def _eagle_backend(
    flags: WorkerFlags, folder: Path, head: EagleConfig, layout: KVLayout, main: LoadedModel, threads: int
) -> EagleBackend:
    """Return the backend of the head in ``folder``: on the CPU kernels if they run the model and support the head, else
    on torch. The model's backend keeps states from now on."""
    from pillion.engine.backends.cpu.cpu_backend import CpuBackend
    from pillion.engine.backends.host_backend import HostBackend
    from pillion.engine.checkpoints.checkpoint import open_checkpoint
    from pillion.engine.checkpoints.weights import DTYPES
    from pillion.engine.drafts.cpu_eagle import CpuEagle
    from pillion.engine.drafts.eagle_head import TorchEagle
    from pillion.engine.drafts.eagle_weights import load_eagle_weights
    from pillion.kernels.torch.torch_linear import Linear

    prepared, backend = main.prepared, main.backend
    assert isinstance(backend, HostBackend)
    backend.set_aux_hidden_state_layers(head.state_layers)
    own = backend.here
    kernels = isinstance(own, CpuBackend) and not unsupported(head.layer, layout.block_size)
    if isinstance(own, CpuBackend) and own.model.shard.whole:
        embedding = own.model.weights.tensors["embedding"]
    else:
        with open_checkpoint(prepared.folder, load_config(prepared.folder)) as checkpoint:
            embedding = checkpoint.load("embedding", DTYPES[prepared.dtype])
    weights = load_eagle_weights(folder, head, embedding, Linear.plain if kernels else Linear)
    if not kernels or not isinstance(own, CpuBackend):
        return TorchEagle(head, weights, layout, prepared.max_model_len)
    cores = parse_cores(flags.cpu_affinity)[:threads]
    return CpuEagle(head, weights, layout, own.model, log.info, threads, cores, core_share(flags))


def _gpu_head(
    flags: WorkerFlags, folder: Path, head: EagleConfig, layout: KVLayout, main: LoadedModel, most_tokens: int
) -> HeadBackend:
    """Return the backend of the head in ``folder`` on a GPU, with compiled kernels and workspace, because the pool
    takes the rest of the memory. The model's backend keeps states from now on."""
    from pillion.engine.backends.gpu.gpu_backend import GpuBackend
    from pillion.engine.backends.gpu.gpu_loading import limits_of
    from pillion.engine.drafts.gpu_eagle import load_gpu_eagle

    backend = main.backend
    assert isinstance(backend, GpuBackend)
    assert isinstance(flags, DecodeFlags)
    limits = limits_of(flags, main.prepared)
    limits = replace(limits, max_tokens=most_tokens, max_samples=limits.max_seqs, max_scored=0)
    return load_gpu_eagle(flags, folder, head, layout, backend, limits)


@contextlib.contextmanager
def _named(model: str) -> Iterator[None]:
    """Prefix ConfigErrors of the block with the draft model."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--speculative-config: draft model {model}: {error.message}") from None


def check_tokenizer(main: Path, draft: Path) -> None:
    """Raise ConfigError unless two tokenizers map all ids to the same texts."""
    files = [folder / "tokenizer.json" for folder in (main, draft)]
    texts = [path.read_bytes() for path in files]
    if texts[0] == texts[1]:
        return
    first, second = (_texts_by_id(json.loads(text)) for text in texts)
    differing = [number for number in first.keys() | second.keys() if first.get(number) != second.get(number)]
    if differing:
        least = min(differing)
        raise ConfigError(
            f"its tokenizer differs from the model's in {len(differing)} ids, the first of them {least}:"
            f" {second.get(least)!r} here, {first.get(least)!r} in the model"
        )


def _texts_by_id(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each id of a tokenizer.json, of any model type."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, Mapping):
        found = {number: text for text, number in vocabulary.items()}
    else:
        found = {number: text for number, (text, _) in enumerate(vocabulary)}
    return found | {token["id"]: token["content"] for token in tokenizer.get("added_tokens", ())}
