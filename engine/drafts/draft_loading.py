"""Loading of a decode worker's draft model or EAGLE-3 head, and the check that its tokenizer is the main model's."""

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

# Max block size of the GPU attention kernels, in tokens.
GPU_BLOCK_TOKENS = 128


def load_draft(
    flags: WorkerFlags,
    config: SpeculativeConfig,
    main: LoadedModel,
    threads: int,
    max_tokens: int,
    load: BackendFactory,
) -> tuple[DraftShape, DraftModel]:
    """Load the draft model or EAGLE-3 head ``config.model`` for the worker's model ``main``; passes have up to
    ``max_tokens`` tokens. Raises ConfigError, with the draft model's name, if it cannot be loaded or its tokenizer
    differs from the model's."""
    if config.method == "eagle3":
        return load_eagle_head(flags, config, main, threads, max_tokens)
    with _named(config.model):
        flags = config.model_flags(flags)
        prepared = prepare(flags, log.info)
        check_tokenizer(main.prepared.folder, prepared.folder)
        max_model_len = min(main.prepared.max_model_len, load_config(prepared.folder).max_position_embeddings)
        # Only for its sizes; the backend's layout may have another version.
        layout = kv_layout(prepared, flags.block_size, kv_cache_dtype=flags.kv_cache_dtype)
        if layout.state_bytes:
            raise ConfigError("its layers have recurrent states; choose a draft model with attention only")
        max_block_tokens = GPU_BLOCK_TOKENS if resolve_device(flags) == "cuda" else 0
        blocks = draft_blocks(main.backend.layout, layout, max_block_tokens)
        flags = replace(flags, max_model_len=max_model_len, block_size=flags.block_size * blocks)
        loaded = load(flags, threads)
        log.info("draft model %s: %d tokens per slot", prepared.name, flags.block_size)
        backend = loaded.backend
        shape = DraftShape(
            namespace=loaded.namespace(),
            block_size=flags.block_size,
            vocab_size=backend.vocab_size,
            max_model_len=max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_batched_tokens=max_tokens,
            original_tokens=loaded.prepared.original_tokens,
        )
        return shape, DraftModel(backend, main.backend.layout.block_bytes, main.backend.vocab_size)


def load_eagle_head(
    flags: WorkerFlags, config: SpeculativeConfig, main: LoadedModel, threads: int, max_tokens: int
) -> tuple[DraftShape, DraftModel]:
    """Load the EAGLE-3 head ``config.model``, and make ``main``'s backend return the hidden states that the head needs.
    Passes have up to ``max_tokens`` tokens. With tensor parallelism on CPUs, the head runs in rank 0's process. Raises
    ConfigError, with the head's name, if it cannot be loaded or was made for another model."""
    # These modules import torch, which a decode worker loads only with a model.
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
            head_backend: HeadBackend = _gpu_head(flags, folder, head, layout, main, max_tokens)
        else:
            head_backend = _cpu_head(flags, folder, head, layout, main, threads)
        log.info("EAGLE-3 head %s: reads the inputs of layers %s", config.model, [*head.aux_hidden_state_layers])
        shape = DraftShape(
            namespace=bytes(HASH_BYTES),
            block_size=layout.block_size,
            vocab_size=backend.vocab_size,
            max_model_len=prepared.max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
            max_num_batched_tokens=max_tokens,
            reads_states=True,
        )
        return shape, EagleModel(head_backend, backend.layout.block_bytes, backend.vocab_size)


def _cpu_head(
    flags: WorkerFlags, folder: Path, head: EagleConfig, layout: KVLayout, main: LoadedModel, threads: int
) -> EagleBackend:
    """Load the head in ``folder`` on the CPU kernels if they run the model and support the head, else on torch. The
    model's backend returns hidden states from now on."""
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
    backend.set_aux_hidden_state_layers(head.aux_hidden_state_layers)
    local = backend.here
    on_kernels = isinstance(local, CpuBackend) and not unsupported(head.layer, layout.block_size)
    if isinstance(local, CpuBackend) and local.model.shard.whole:
        embedding = local.model.weights.tensors["embedding"]
    else:
        with open_checkpoint(prepared.folder, load_config(prepared.folder)) as checkpoint:
            embedding = checkpoint.load("embedding", DTYPES[prepared.dtype])
    weights = load_eagle_weights(folder, head, embedding, Linear.plain if on_kernels else Linear)
    if not on_kernels or not isinstance(local, CpuBackend):
        return TorchEagle(head, weights, layout, prepared.max_model_len)
    cores = parse_cores(flags.cpu_affinity)[:threads]
    return CpuEagle(head, weights, layout, local.model, log.info, threads, cores, core_share(flags))


def _gpu_head(
    flags: WorkerFlags, folder: Path, head: EagleConfig, layout: KVLayout, main: LoadedModel, max_tokens: int
) -> HeadBackend:
    """Load the head in ``folder`` on a GPU and allocate its workspace, before the pool gets the remaining memory. The
    model's backend returns hidden states from now on."""
    from pillion.engine.backends.gpu.gpu_backend import GpuBackend
    from pillion.engine.backends.gpu.gpu_loading import limits_of
    from pillion.engine.drafts.gpu_eagle import load_gpu_eagle

    backend = main.backend
    assert isinstance(backend, GpuBackend)
    assert isinstance(flags, DecodeFlags)
    limits = limits_of(flags, main.prepared)
    limits = replace(limits, max_tokens=max_tokens, max_samples=limits.max_seqs, max_scored=0)
    return load_gpu_eagle(flags, folder, head, layout, backend, limits)


@contextlib.contextmanager
def _named(model: str) -> Iterator[None]:
    """Prefix the messages of ConfigErrors in the context with the draft model's name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--speculative-config: draft model {model}: {error.message}") from None


def check_tokenizer(main: Path, draft: Path) -> None:
    """Raise ConfigError unless the tokenizers in two model folders map all ids to the same texts."""
    files = [folder / "tokenizer.json" for folder in (main, draft)]
    texts = [path.read_bytes() for path in files]
    if texts[0] == texts[1]:
        return
    first, second = (_texts_by_id(json.loads(text)) for text in texts)
    differing = [number for number in first.keys() | second.keys() if first.get(number) != second.get(number)]
    if differing:
        example = min(differing)
        raise ConfigError(
            f"its tokenizer differs from the model's in {len(differing)} ids, e.g. {example}: {second.get(example)!r},"
            f" not {first.get(example)!r}"
        )


def _texts_by_id(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each id of a tokenizer.json, of any tokenizer model (BPE, WordPiece, Unigram)."""
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, Mapping):
        texts = {number: text for text, number in vocabulary.items()}
    else:
        texts = {number: text for number, (text, _) in enumerate(vocabulary)}
    return texts | {token["id"]: token["content"] for token in tokenizer.get("added_tokens", ())}
