"""Defines rooms and seams: what the core can do without, and where it comes in.

    core                 a seam: ``ROUTES = Seam[MakeRoutes]("gateway.http_api.routes")``, with the protocol it carries
    a room               a function or class that meets the protocol, in a folder of the component that it belongs to
    the table (ROOMS)    the room's paths, and for each seam the place of what the room enters there
    a composition root   ``for make in entered(ROUTES)``: what is there comes in, in the order of the table

A room comes off with ``git rm -r`` of its paths: an entry whose module is gone is passed over. ``python -m
tests.removal ROOM`` shows it; docs/rooms.md has a row for each. The core imports no room (tests/test_rooms.py), and a
room that uses another one names it in ``needs``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Generic, TypeVar, cast

from pillion.errors import ConfigError

T = TypeVar("T")


class Seam(Generic[T]):
    """Names a place in the core at which rooms add functions or classes, each of type T."""

    def __init__(self, name: str) -> None:
        self.name = name


@dataclass(frozen=True, slots=True)
class Room:
    """Describes a feature that can be taken away.

    Attributes:
        name: its name in docs/rooms.md and in error messages.
        paths: the folders and files that are its own, from the root of the repository, with those of its tests.
        entries: by the name of a seam, what the room enters there, as ``module:attribute``.
        needs: the rooms without which it cannot work.
    """

    name: str
    paths: tuple[str, ...]
    entries: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


# These are all files of simulator/ but those that the fleets need too.
SIMULATOR = (
    *("__main__", "campaign", "checker", "components", "disks", "faults", "hash_model", "lives", "machine"),
    *("mutations", "network", "redis_client", "redis_keyspace", "redis_lua", "redis_model", "requests", "schedule"),
    *("seams", "shrink", "sim_threads", "step_driver", "supervision", "virtual_loop", "world"),
)
SIMULATOR_TESTS = ("campaign", "redis_client", "redis_model", "sim_threads", "virtual_loop")

ROOMS: tuple[Room, ...] = (
    Room(
        "page",
        paths=("gateway/ui", "tests/gateway/ui", "tests/cluster/test_ui.py"),
        entries={"gateway.http_api.routes": "pillion.gateway.ui.ui_api:ui_routes"},
    ),
    Room(
        "Anthropic door",
        paths=("gateway/anthropic", "tests/gateway/anthropic"),
        entries={"gateway.http_api.routes": "pillion.gateway.anthropic.anthropic_api:anthropic_routes"},
        needs=("prefix pins",),
    ),
    Room(
        "Responses door",
        paths=("gateway/responses", "tests/gateway/responses"),
        entries={"gateway.http_api.routes": "pillion.gateway.responses.responses_api:responses_routes"},
    ),
    Room(
        "prefix pins",
        paths=(
            "gateway/prefix_pins",
            "kvstore/prefix_pins",
            "pillion/cli/cache.py",
            "pillion/cli/cache_command.py",
            "tests/gateway/prefix_pins",
            "tests/kvstore/prefix_pins",
            "tests/cluster/test_prefixes.py",
            "tests/pillion/cli/test_cache.py",
        ),
        entries={
            "gateway.http_api.routes": "pillion.gateway.prefix_pins.prefixes_api:prefix_routes",
            "gateway.grpc_api.calls": "pillion.gateway.prefix_pins.prefix_servicer:prefix_calls",
            "kvstore.node.pins": "pillion.kvstore.prefix_pins.node_pins:make_pins",
            "cli.commands": "pillion.cli.cache_command:cache",
        },
    ),
    Room(
        "batches",
        paths=("gateway/batches", "tests/gateway/batches"),
        entries={"gateway.parts": "pillion.gateway.batches.batch_part:BatchPart"},
    ),
    Room(
        "read-ahead",
        paths=("gateway/read_ahead", "tests/gateway/read_ahead"),
        entries={"gateway.parts": "pillion.gateway.read_ahead.read_ahead:ReadAhead"},
    ),
    Room(
        "retentions",
        paths=(
            *("gateway/retentions", "kvstore/retentions", "benchmarks/kv_lifetime.py"),
            *("tests/gateway/retentions", "tests/kvstore/retentions", "tests/cluster/test_retentions.py"),
        ),
        entries={
            "gateway.parts": "pillion.gateway.retentions.retentions:Retentions",
            "kvstore.node.retentions": "pillion.kvstore.retentions.node_retentions:make_retentions",
        },
    ),
    Room(
        "pooling",
        paths=("gateway/pooling", "tests/gateway/pooling", "tests/cluster/test_text_lists.py"),
        entries={
            "gateway.vectors": "pillion.gateway.pooling.vectors:GatewayVectors",
            "gateway.http_api.routes": "pillion.gateway.pooling.pooling_pages:pooling_routes",
            "gateway.grpc_api.calls": "pillion.gateway.pooling.text_servicer:text_calls",
        },
    ),
    Room(
        "encoders",
        paths=("engine/encoders", "tests/engine/encoders"),
        entries={
            "engine.models.encoders": "pillion.engine.encoders.encoder_parser:ENCODER_PARSER",
            "engine.backends.encoders": "pillion.engine.encoders.encoder_backend:load_encoder",
        },
        needs=("pooling",),
    ),
    # Slots of partial blocks are given up before those of drafts. After a step, a sequence goes back to where a state
    # stands before a head gets the inputs of layers of its rows, which are computed again from there.
    Room(
        "partial blocks",
        paths=("engine/partial_blocks", "tests/engine/partial_blocks"),
        entries={"engine.worker.features": "pillion.engine.partial_blocks.partial_blocks:load_partial_blocks"},
    ),
    Room(
        "states",
        paths=(
            *("engine/states", "kvstore/states", "benchmarks/state_hits.py"),
            *("tests/engine/states", "tests/kvstore/states", "tests/cluster/test_states.py"),
            "tests/cluster/test_states_on_nodes.py",
        ),
        entries={
            "engine.worker.features": "pillion.engine.states.states:load_states",
            "engine.backends.states": "pillion.engine.states.states_check:check_states",
            "kvstore.node.states": "pillion.kvstore.states.state_eviction:keep_states",
        },
    ),
    # Forced tokens are proposed before guesses, and a backend keeps the states for a head before it has adapters.
    Room(
        "grammars",
        paths=("engine/grammars", "tests/engine/grammars"),
        entries={
            "engine.worker.features": "pillion.engine.grammars.grammar_feature:load_grammars",
            "supervisor.read_ahead": "pillion.engine.grammars.compiler:line_to_read_ahead",
        },
    ),
    Room(
        "drafts",
        paths=("engine/drafts", "tests/engine/drafts"),
        entries={"engine.worker.features": "pillion.engine.drafts.draft_feature:load_drafts"},
    ),
    Room(
        "adapters",
        paths=(
            "gateway/adapters",
            "engine/adapter_slots",
            "engine/adapters",
            "kvstore/adapters",
            "kernels/cpu/adapters",
            "pillion/cli/adapters.py",
            "pillion/cli/adapters_command.py",
            "tests/gateway/adapters",
            "tests/engine/adapter_slots",
            "tests/engine/adapters",
            "tests/kvstore/adapters",
            "tests/kernels/cpu/adapters",
            "tests/pillion/offline/test_offline_adapters.py",
            "tests/cluster/test_adapters.py",
        ),
        entries={
            "engine.worker.features": "pillion.engine.adapter_slots.adapter_feature:load_adapters",
            "engine.backends.adapter_reader": "pillion.engine.adapters.adapter_reader:reader_of",
            "engine.backends.torch.adapters": "pillion.engine.adapters.step_adapters:TorchAdapters",
            "engine.backends.cpu.adapters": "pillion.engine.adapters.cpu_adapters:CpuAdapters",
            "engine.backends.cpu.compile_adapters": "pillion.engine.adapters.cpu_adapters:compile_adapter_kernels",
            "kvstore.node.calls": "pillion.kvstore.adapters.node_adapters:NodeAdapters",
            "gateway.adapters": "pillion.gateway.adapters.adapter_names:ADAPTER_NAMES",
            "gateway.parts": "pillion.gateway.adapters.adapter_part:AdapterPart",
            "gateway.grpc_api.calls": "pillion.gateway.adapters.adapter_servicer:adapter_calls",
            "cli.commands": "pillion.cli.adapters_command:adapters",
        },
    ),
    Room(
        "adapters on GPUs",
        paths=("engine/gpu_adapters",),
        entries={"engine.backends.gpu.adapters": "pillion.engine.gpu_adapters.gpu_adapters:GpuAdapters"},
        needs=("adapters", "GPU"),
    ),
    Room(
        "ranks",
        paths=(
            "engine/ranks",
            "kernels/cpu/ranks",
            "tests/engine/ranks",
            "tests/kernels/cpu/ranks",
            "tests/cluster/test_ranks.py",
        ),
        entries={
            "engine.backends.ranks": "pillion.engine.ranks.rank_loading:Ranks",
            "engine.backends.cpu.meeting": "pillion.engine.ranks.cpu_rank:RankMeeting",
        },
    ),
    Room(
        "ranks on GPUs",
        paths=("engine/gpu_ranks",),
        entries={"engine.ranks.gpu": "pillion.engine.gpu_ranks.gpu_rank_loading:GpuRanks"},
        needs=("ranks", "GPU"),
    ),
    Room(
        "stages",
        paths=(
            *("engine/stages", "benchmarks/stages.py"),
            *("tests/engine/stages", "tests/support/stage_model.py", "tests/cluster/test_stages.py"),
        ),
        entries={"engine.backends.stages": "pillion.engine.stages.stage_loading:Stages"},
        needs=("ranks",),
    ),
    Room(
        "stages on GPUs",
        paths=("engine/gpu_stages",),
        entries={"engine.stages.gpu": "pillion.engine.gpu_stages.gpu_stage_loading:GpuStages"},
        needs=("stages", "ranks", "ranks on GPUs", "GPU"),
    ),
    Room(
        "formats",
        paths=(
            "gateway/formats",
            "gateway/grammars",
            "tests/gateway/formats",
            "tests/gateway/grammars",
            "tests/gateway/test_tools.py",
            "tests/cluster/structured.py",
        ),
        entries={"gateway.formats": "pillion.gateway.grammars.held_formats:FORMATS_AND_GRAMMARS"},
    ),
    Room(
        "forecast",
        paths=("gateway/scaling", "tests/gateway/scaling"),
        entries={"gateway.planning.forecaster": "pillion.gateway.scaling.forecaster:make_forecaster"},
    ),
    Room(
        "load generator",
        paths=("pillion/loadgen", "pillion/cli/bench_command.py", "tests/pillion/loadgen"),
        entries={"cli.commands": "pillion.cli.bench_command:bench"},
    ),
    Room(
        "fleets",
        paths=("simulator/fleet", "pillion/cli/simulate_command.py", "tests/simulator/fleet"),
        entries={"cli.commands": "pillion.cli.simulate_command:simulate"},
        needs=("load generator",),
    ),
    Room(
        "fleets with states",
        paths=("simulator/fleet_states", "benchmarks/state_fleets.py", "tests/simulator/fleet_states"),
        entries={"simulator.fleet.states": "pillion.simulator.fleet_states.fleet_states:FleetStates"},
        needs=("fleets", "states"),
    ),
    Room(
        "simulator",
        paths=(
            *(f"simulator/{name}.py" for name in SIMULATOR),
            *(f"tests/simulator/test_{name}.py" for name in SIMULATOR_TESTS),
        ),
        needs=("disk tier", "pool survival", "transfers", "offline"),
    ),
    Room(
        "events",
        paths=("kvstore/events", "pillion/cli/events_command.py", "tests/kvstore/events"),
        entries={
            "kvstore.node.watch": "pillion.kvstore.events.followers:watch_blocks",
            "cli.commands": "pillion.cli.events_command:events",
        },
    ),
    Room(
        "transfers",
        paths=("kvstore/exchange", "tests/kvstore/exchange"),
        entries={"kvstore.transfer.exchange": "pillion.kvstore.exchange.node_exchange:NodeExchange"},
    ),
    Room(
        "NIXL",
        paths=("kvstore/transfer/nixl",),
        entries={"kvstore.transfer.one_sided": "pillion.kvstore.transfer.nixl.nixl_plane:NixlPlane"},
        needs=("transfers",),
    ),
    Room(
        "offline",
        paths=(
            "pillion/offline",
            "pillion/net/in_process.py",
            "examples/offline.py",
            "tests/pillion/offline/test_offline.py",
            "tests/pillion/offline/test_offline_life.py",
            "tests/pillion/offline/test_vllm_options.py",
            "tests/pillion/net/test_in_process.py",
        ),
        entries={
            "pillion.LLM": "pillion.offline.llm:LLM",
            "pillion.EngineArgs": "pillion.offline.vllm_options:EngineArgs",
            "pillion.LoRARequest": "pillion.offline.vllm_options:LoRARequest",
            "net.in_process": "pillion.net.in_process:CALLS_WITHIN",
        },
    ),
    Room(
        "standbys",
        paths=("pillion/supervisor/standbys", "tests/pillion/supervisor/standbys"),
        entries={
            "supervisor.turn": "pillion.supervisor.standbys.standby:turn_of_process",
            "supervisor.stand_by": "pillion.supervisor.standbys.standby:stand_by",
            "supervisor.launcher": "pillion.supervisor.standbys.fork_server:ForkServer",
        },
    ),
    Room(
        "pool survival",
        paths=("kvstore/pool_survival", "pillion/cli/keeper_command.py", "tests/kvstore/pool_survival"),
        entries={
            "kvstore.memory.surviving": "pillion.kvstore.pool_survival.surviving_memory:SurvivingMemory",
            "supervisor.keeper": "pillion.cli.keeper_command:keeper_spec",
            "cli.commands": "pillion.cli.keeper_command:keeper",
        },
    ),
    Room(
        "disk tier",
        paths=("kvstore/tiers/disk_tier", "tests/kvstore/tiers/disk_tier"),
        entries={"kvstore.tiers.near": "pillion.kvstore.tiers.disk_tier.disk:DiskMedium"},
    ),
    Room(
        "quantized checkpoints",
        paths=(
            *("engine/quantized", "kernels/cpu/few_bits", "pillion/cli/accuracy_table.py"),
            *("tests/engine/quantized", "tests/kernels/cpu/few_bits"),
            *("tests/support/quantized.py", "benchmarks/quantization.py"),
        ),
        entries={
            "engine.models.quantization": "pillion.engine.quantized.quantization_methods:parse_quantization",
            "engine.checkpoints.format": "pillion.engine.quantized.formats.table:format_of",
            "engine.checkpoints.files": "pillion.engine.quantized.gguf_files:GgufFiles",
            "engine.checkpoints.quantizer": "pillion.engine.quantized.quantizer:quantize_folder",
            "engine.backends.cpu.few_bits": "pillion.engine.quantized.few_bit_rows:rows_of",
            "kernels.cpu.few_bits": "pillion.kernels.cpu.few_bits.few_bit_products:FEW_BIT_PRODUCTS",
            "cli.accuracy": "pillion.cli.accuracy_table:show_accuracy",
        },
    ),
    Room(
        "GPU",
        paths=(
            *("kernels/gpu", "engine/backends/gpu", "kvstore/gpu", "benchmarks/gpu", "testbed/fake_cuda"),
            *("tests/gpu", "tests/kvstore/gpu", "tests/engine/backends/gpu"),
        ),
        entries={
            "engine.backends.devices": "pillion.engine.backends.gpu.gpu_devices:Gpus",
            "engine.backends.loader": "pillion.engine.backends.gpu.gpu_loading:load_gpu_worker",
            "kvstore.memory.domain": "pillion.kvstore.gpu.cuda_domain:open_cuda_domain",
            "kvstore.client.map_pool": "pillion.kvstore.gpu.mapped_memory:map_pool",
            "kvstore.node.regions": "pillion.kvstore.gpu.region_server:RegionServer",
            "kvstore.transfer.driver": "pillion.kvstore.gpu.cuda_driver:driver_version",
        },
    ),
    Room(
        "states on GPUs",
        paths=("engine/gpu_states", "kernels/gpu_states"),
        entries={
            "engine.backends.gpu.states": "pillion.engine.gpu_states.gpu_states:GpuStates",
            "kernels.gpu.specs": "pillion.kernels.gpu_states.state_specs:build_specs",
        },
        needs=("states", "GPU"),
    ),
    Room(
        "object tier",
        paths=("kvstore/tiers/object_tier", "tests/kvstore/tiers/object_tier"),
        entries={
            "kvstore.tiers.far": "pillion.kvstore.tiers.object_tier.object_tier:ObjectMedium",
            "kvstore.tiers.far_url": "pillion.kvstore.tiers.object_tier.object_store:parse_object_url",
        },
    ),
)


def entered(seam: Seam[T]) -> list[T]:
    """Returns the functions and classes that rooms add at a seam, in the order of the table, and imports their modules.
    Rooms that are gone add nothing."""
    found = (_load(room.entries[seam.name]) for room in ROOMS if seam.name in room.entries)
    return [cast("T", one) for one in found if one is not None]


def entered_one(seam: Seam[T]) -> T | None:
    """Returns the function or class that the only room of a seam adds there, or None if that room is gone. Flags that
    only that room understands have been refused then (:func:`pillion.config.refuse_missing_rooms`)."""
    return next(iter(entered(seam)), None)


def require(seam: Seam[T], room: str, what: str) -> T:
    """Returns the function or class that the only room of a seam adds there. Raises as :func:`require_room`."""
    require_room(room, what)
    (found,) = entered(seam)
    return found


def require_room(name: str, what: str) -> None:
    """Raises ConfigError where a room is gone, saying that ``what`` needs it. Nothing of the room is imported."""
    if not any(one.name == name and all(map(_is_there, one.entries.values())) for one in ROOMS):
        raise ConfigError(f"{what} needs the room {name!r}, which is not in this installation (docs/rooms.md)")


def entry_modules(seam: str) -> tuple[str, ...]:
    """Returns the names of the modules that rooms add at the seam of this name, as far as they exist; none is
    imported."""
    places = [room.entries[seam] for room in ROOMS if seam in room.entries]
    return tuple(place.partition(":")[0] for place in places if _is_there(place))


def _is_there(place: str) -> bool:
    try:
        return importlib.util.find_spec(place.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


@cache
def _load(place: str) -> object | None:
    """Returns the attribute at ``module:attribute``, or None if the module is gone. Raises what importing it raises."""
    module, _, attribute = place.partition(":")
    try:
        return cast("object", getattr(importlib.import_module(module), attribute))
    except ModuleNotFoundError as error:
        # A missing package of another project does not mean that the room is gone.
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return None
        raise
