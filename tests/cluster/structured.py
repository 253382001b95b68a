"""Answers of a given shape under everything that may happen to them, with real processes.

    {shape} x {split policy} x {answers} x {draft tokens} x {prefix} x {trouble}

Each case's answers are valid, and token by token and log probability by log probability those of an undisturbed run;
the undisturbed run's log probabilities are those of the masked distribution, by transformers and a matcher of the
test's own. `make parity` runs every combination and prints a table; the test beside this file runs a subset in which
every pair of values but of shapes occurs. The model is random, small and in float32; its tokens are bytes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import pathlib
import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jsonschema
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer

from lab.testbed.cluster import ServedCluster, served, words_of
from lab.testbed.conditions import WITHIN_S, result_of, wait_for
from lab.testbed.faults.board import hook_environment
from lab.testbed.forks import ForkedComponent, shared_forks
from lab.testbed.ports import free_port
from lab.testbed.tiny_model import BOS, EOS, save_model
from pillion import Client
from pillion.errors import PillionError
from pillion.gateway.formats.model_formats import choose_formats
from pillion.gateway.grammars.answer_grammar import join
from pillion.gateway.grammars.structured_outputs import structured_piece
from pillion.gateway.grammars.tool_pieces import answer_pieces
from pillion.gateway.http_api.custom_tools import ToolGrammar, custom_tool
from pillion.supervisor.child_process import child_environ
from pillion.supervisor.local_cluster import compute_environ
from pillion.types import (
    ChatMessage,
    ChatOptions,
    Delta,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StructuredOutputs,
    Tool,
    ToolOptions,
)
from tests.support.covering import covering_rows
from tests.support.drafts import speculative
from tests.support.patches import PATCH, PATCHED

POLICIES = ("disaggregated", "colocated", "fraction:0.5")
ANSWERS = (1, 4)
DRAFT_TOKENS = (True, False)
PREFIXES = ("miss", "hit")
# Killed amid all answers. A prefill worker is done by then, so one is killed at its first launch for these prompts
# instead.
KILLED = {"decode worker killed": "decode", "KV node killed": "kvnode", "gateway killed": "gateway"}
PREFILL_KILLED = "prefill worker killed"
TROUBLES = ("none", *KILLED, PREFILL_KILLED, "preempted")
_PREFILLED = (PREFILL_KILLED, POLICIES[0], "miss")

# 448 slots of 16 tokens suffice for a case; the crowd's texts together exceed them.
FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--chunk-size", "64", "--kv-pool-bytes", str(448 * 8192))
MAX_TOKENS = 600
# Tokens of every answer before a kill, with many more to come.
TOKENS_BEFORE_KILL = 8
CROWD, CROWD_TOKENS = 14, 900
# Steps of the decode worker between two checks of all answers' progress, and the pool share of the crowd's texts that
# just leaves room for a group's prompts. With draft tokens a step adds at most five tokens to an answer, of some two
# hundred.
STEPS_BETWEEN_LOOKS, CROWDED_SHARE = 4, 0.75
RESULT_WITHIN_S = 300.0
# The supervisor gives up after too many deaths of a component.
KILLS_PER_CLUSTER = 4
CASES_AT_ONCE = 8
LOGPROB_TOLERANCE = 2e-3

_ITEM = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["harbour", "lighthouse", "pier"]},
        "an identifier of some length": {"type": "string", "pattern": "^[a-z]{80}$"},
        "depth": {"type": "integer", "minimum": 1000, "maximum": 9999},
        "open": {"type": "boolean"},
    },
    "required": ["kind", "an identifier of some length", "depth", "open"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 2, "maxItems": 2}
PATTERN = r"([a-z]{7}-[0-9]{3}, ){25}[A-F]{8}\."
_JSON = StructuredOutputs(json=json.dumps(SCHEMA))
_ARGUMENTS = {"type": "object", "properties": {"places": SCHEMA}, "required": ["places"], "additionalProperties": False}
_TOOL = Tool(name="report", parameters=json.dumps(_ARGUMENTS), strict=True)
_LINES = r"""([a-z]{6}"\\-[0-9]{3}\n){12}[A-F]{8}\."""


def _required(tool: Tool) -> ToolOptions:
    return ToolOptions(tools=(tool,), choice="required", parallel_tool_calls=False)


def _custom(name: str, syntax: Literal["lark", "regex"], definition: str) -> ToolOptions:
    return _required(custom_tool(name, "", ToolGrammar(syntax, definition)))


# Tokens are bytes except for these two, and the chat's own.
THINK, END_THINK, VOCABULARY = "<think>", "</think>", 260
# Shortens the random model's reasoning, otherwise some 260 tokens; reported log probabilities are unaffected.
END_THINK_BIAS = {VOCABULARY - 1: 3.0}
# Shortens the model's patches, otherwise some thousand tokens.
PATCH_BIAS = {2 + ord(character) - ord("!"): bias for character, bias in (("\\", 3.0), ("n", 3.0), ("*", 2.0))}
TEXT = "Which places are there at the harbour, and what is known of each? Say it in the form that is asked for."
TEMPLATE = (
    "{# <tool_call> #}{% if tools %}({% for t in tools %}{{ t.function.name }} {% endfor %}tools){% endif %}"
    "{% for message in messages %}"
    f"{BOS}{{{{ message.role }}}}\n{{{{ message.content }}}}{EOS}\n{{% endfor %}}{BOS}assistant\n{THINK}"
    f"{{% if not enable_thinking %}}{END_THINK}{{% endif %}}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    outputs: StructuredOutputs | None = None
    tools: ToolOptions = field(default_factory=ToolOptions)
    thinks: bool = False
    bias: Mapping[int, float] = field(default_factory=dict)
    matches: str = ""
    # Seed with which the random model writes some hundred tokens, with room for numerical differences.
    seed: int = 11
    max_tokens: int = MAX_TOKENS

    @property
    def prompt(self) -> str:
        """Return the text that the template renders."""
        names = "".join(f"{tool.name} " for tool in self.tools.tools)
        tools = f"({names}tools)" if names else ""
        thought = "" if self.thinks else END_THINK
        return f"{tools}{BOS}user\n{TEXT}{EOS}\n{BOS}assistant\n{THINK}{thought}"

    def request(self, salt: str, **changes: Any) -> GenerateRequest:
        """Return the request; ``changes`` are sampling parameters."""
        asked: dict[str, Any] = {
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "temperature": 1.0,
            "logprobs": 0,
            **changes,
        }
        asked["logit_bias"] = self.bias
        return GenerateRequest(
            messages=(ChatMessage("user", TEXT),),
            chat=ChatOptions(chat_template_kwargs=json.dumps({"enable_thinking": self.thinks})),
            tools=self.tools,
            sampling=SamplingParams(structured_outputs=self.outputs, **asked),
            cache_salt=salt,
            priority=10,
        )


SHAPES = {
    "JSON schema": Shape(_JSON),
    "regex": Shape(StructuredOutputs(regex=PATTERN)),
    "tools required": Shape(tools=_required(_TOOL)),
    "reasoning": Shape(_JSON, thinks=True, bias=END_THINK_BIAS),
    "patches by Lark": Shape(
        tools=_custom("apply_patch", "lark", PATCH), bias=PATCH_BIAS, matches=PATCHED, seed=2, max_tokens=1500
    ),
    "lines by regex": Shape(tools=_custom("lines", "regex", _LINES), matches=_LINES),
}


@dataclass(frozen=True, slots=True)
class StructuredCase:
    """One combination."""

    shape: str
    policy: str
    answers: int
    draft_tokens: bool
    prefix: str
    trouble: str

    def __str__(self) -> str:
        draft_tokens = "draft_tokens" if self.draft_tokens else "no draft tokens"
        return f"{self.shape} / {self.policy} / n={self.answers} / {draft_tokens} / {self.prefix} / {self.trouble}"


_DIMENSIONS = (tuple(SHAPES), POLICIES, ANSWERS, DRAFT_TOKENS, PREFIXES, TROUBLES)


def full_matrix() -> list[StructuredCase]:
    """Return every combination."""
    return [StructuredCase(*row) for row in itertools.product(*_DIMENSIONS)]


def pairwise() -> list[StructuredCase]:
    """Return combinations in which every pair of values occurs, but for shapes, which take turns: what a shape is made
    of and what becomes of its stream are decided at different places."""
    rows = zip(itertools.cycle(SHAPES), covering_rows(_DIMENSIONS[1:]), strict=False)
    return [StructuredCase(shape, *row) for shape, row in rows]  # type: ignore[arg-type]


@dataclass(slots=True)
class Answers:
    """A request's output by answer: tokens, log probabilities, text (arguments of tool calls), reasoning and finish
    reason; and the last message."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, FinishReason | None] = field(default_factory=dict)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Add the next message."""
        self.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        self.logprobs.setdefault(delta.index, []).extend(one.logprob for one in delta.logprobs)
        text = delta.text + "".join(part.arguments for part in delta.tool_calls)
        self.texts[delta.index] = self.texts.get(delta.index, "") + text
        self.reasoning[delta.index] = self.reasoning.get(delta.index, "") + delta.reasoning
        self.reasons[delta.index] = delta.finish_reason or self.reasons.get(delta.index)
        self.last = delta

    def begun(self, count: int) -> bool:
        """Return True if ``count`` answers have enough tokens for a kill in between."""
        return sum(len(tokens) >= TOKENS_BEFORE_KILL for tokens in tuple(self.tokens.values())) == count


def first_defect(shape: str, answers: Answers, count: int) -> str:
    """Return errors of answers by their shape; "" if all are valid."""
    if len(answers.texts) != count:
        return f"{len(answers.texts)} answers"
    reason = FinishReason.TOOL_CALLS if SHAPES[shape].tools.tools else FinishReason.STOP
    schema = _ARGUMENTS if SHAPES[shape].tools.tools else SCHEMA
    for index, text in answers.texts.items():
        if answers.reasons[index] is not reason:
            return f"answer {index} ended by {answers.reasons[index]}"
        if len(answers.logprobs[index]) != len(answers.tokens[index]):
            return f"{len(answers.logprobs[index])} log probabilities of {len(answers.tokens[index])} tokens"
        if SHAPES[shape].thinks != bool(answers.reasoning[index]):
            return f"answer {index} has the reasoning {answers.reasoning[index][:80]!r}"
        if expression := SHAPES[shape].matches:
            if not re.fullmatch(expression, json.loads(text)["input"]):
                return f"answer {index} does not match: {text[:80]!r}"
            continue
        if shape == "regex":
            if not re.fullmatch(PATTERN, text):
                return f"answer {index} does not match: {text[:80]!r}"
            continue
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            return f"answer {index} is not valid: {error}"
    return ""


def difference(wanted: Answers, got: Answers) -> str:
    """Return how two runs of a request differ; "" if they agree."""
    for index, tokens in wanted.tokens.items():
        if got.tokens.get(index) != tokens:
            same = [one == other for one, other in zip(tokens, got.tokens.get(index, []), strict=False)]
            return f"answer {index} differs from token {[*same, False].index(False)} of {len(tokens)} on"
        most = np.abs(np.array(wanted.logprobs[index]) - np.array(got.logprobs[index])).max()
        if most > LOGPROB_TOLERANCE:
            return f"log probabilities of answer {index} differ by {most:.4f}"
    return ""


class MaskedOracle:
    """Log probabilities of an answer's tokens by transformers, over what a matcher of the same grammar allows."""

    def __init__(self, folder: pathlib.Path) -> None:
        from llguidance import LLTokenizer
        from transformers import AutoModelForCausalLM

        self._codec = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        vocab = self._model.config.vocab_size
        self._tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=vocab, eos_token=1)

    @torch.inference_mode()
    def logprobs(self, shape: str, answer: Sequence[int]) -> list[float]:
        """Return one log probability per token of ``answer``, after the shape's prompt."""
        from llguidance import LLMatcher

        prompt = self._codec.encode(SHAPES[shape].prompt).ids
        logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
        matcher = LLMatcher(self._tokenizer, self._grammar(SHAPES[shape]))
        for row, token in zip(logits, answer, strict=True):
            allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: len(row)] > 0
            row[torch.from_numpy(~allowed)] = -torch.inf
            assert matcher.consume_token(token), matcher.get_error()
        found: list[float] = logits.log_softmax(-1)[range(len(answer)), list(answer)].tolist()
        return found

    def _grammar(self, shape: Shape) -> str:
        formats = choose_formats(TEMPLATE, self._codec, "hermes", "deepseek_r1")
        form = formats.output_format(shape.request(""), shape.prompt)
        piece = None if shape.outputs is None else structured_piece(shape.outputs)
        return join(answer_pieces(form, formats, shape.tools, piece)).text

    def difference(self, shape: str, answers: Answers) -> str:
        """Return errors of reported log probabilities; "" if none."""
        for index, tokens in answers.tokens.items():
            wanted = np.array(self.logprobs(shape, tokens))
            most = np.abs(wanted - np.array(answers.logprobs[index])).max()
            if most > LOGPROB_TOLERANCE:
                return f"log probabilities of answer {index} are {most:.4f} off the masked distribution's"
        return ""


class StructuredCluster:
    """A running cluster with a gateway for each split policy, and a client of each; the supervisor has the first one's
    gateway, and ``gateways`` are the others by their policies."""

    def __init__(self, running: ServedCluster, clients: dict[str, Client], gateways: dict[str, GatewayProcess]) -> None:
        self.running = running
        self._clients = clients
        self._gateways = gateways

    def ask(self, case: StructuredCase, salt: str, answers: Answers, **changes: Any) -> Answers:
        """Run a case's request; ``answers`` grows meanwhile."""
        request = SHAPES[case.shape].request(salt, **{"n": case.answers, **changes})
        for delta in self._clients[case.policy]._stream(request, None, None).deltas():
            answers.add(delta)
        return answers

    def run_all(self, cases: Sequence[StructuredCase]) -> list[Answers]:
        """Run cases of one trouble at once, under it."""
        trouble, number = cases[0].trouble, next(_numbers)
        salts = [f"case {number} {place}" for place in range(len(cases))]
        found = [Answers() for _ in cases]
        for case, salt in zip(cases, salts, strict=True):
            if case.prefix == "hit":
                self.ask(case, salt, Answers(), n=1, max_tokens=1)
        others = {"none": contextlib.nullcontext, "preempted": self._crowd, PREFILL_KILLED: self._prefill_armed}
        disturbed = others.get(trouble, self._armed)
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool, disturbed():
            asked = [pool.submit(self.ask, *each) for each in zip(cases, salts, found, strict=True)]
            if trouble in KILLED:

                def all_begun() -> bool:
                    return all(one.begun(case.answers) for one, case in zip(found, cases, strict=True))

                with self.running.holding_all("answers in their middle", all_begun, STEPS_BETWEEN_LOOKS) as held:
                    held.kill() if KILLED[trouble] == "decode" else self._kill(KILLED[trouble])
            elif trouble == "preempted":
                # They get memory while the crowd stands still, and must give it up when that goes on. Where the decode
                # worker opens a ticket itself, it goes on for a few steps until it has.
                tickets = CROWD + len(cases)

                def all_opened() -> bool:
                    return self.running.node_status().tickets >= tickets

                with self.running.holding_all("all tickets", all_opened, STEPS_BETWEEN_LOOKS):
                    pass
            elif any((case.trouble, case.policy, case.prefix) == _PREFILLED for case in cases):
                self.running.struck()
            return [one.result(RESULT_WITHIN_S) for one in asked]

    def _kill(self, role: str) -> None:
        self.running.kill(role)
        if role == "gateway":
            for gateway in self._gateways.values():
                gateway.end(signal.SIGKILL)
                gateway.start()

    @contextlib.contextmanager
    def _armed(self) -> Iterator[None]:
        self.running.arm(STEPS_BETWEEN_LOOKS, signal.SIGSTOP)
        yield

    @contextlib.contextmanager
    def _prefill_armed(self) -> Iterator[None]:
        self.running.arm(1, signal.SIGKILL, point="prefill, before a launch")
        yield
        self.running.board.clear()

    @contextlib.contextmanager
    def _crowd(self) -> Iterator[None]:
        """Run texts that need more of the pool than there is, and come first. When the block begins, the decode worker
        is held, as they have most of the pool."""
        over = threading.Event()

        def one(number: int) -> None:
            ids = tuple(2 + (number * 7919 + position * 31) % 256 for position in range(200))
            sampling = SamplingParams(temperature=0.0, max_tokens=CROWD_TOKENS, ignore_eos=True)
            request = GenerateRequest(token_ids=ids, sampling=sampling, cache_salt=f"crowd {number}")
            while not over.is_set():
                with contextlib.closing(self._clients[POLICIES[0]]._stream(request, None, None).deltas()) as stream:
                    for _ in stream:
                        if over.is_set():
                            break

        def crowded() -> bool:
            status = self.running.node_status()
            taken = status.leased_blocks + status.pinned_blocks + status.reserved_blocks
            return status.tickets == CROWD and taken >= CROWDED_SHARE * status.total_blocks

        self.running.arm(STEPS_BETWEEN_LOOKS, signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
            running = [pool.submit(one, number) for number in range(CROWD)]
            try:
                self.running.struck()
                while not crowded():
                    with self.running.holding():
                        self.running.arm(STEPS_BETWEEN_LOOKS, signal.SIGSTOP)
                    self.running.struck()
                yield
            finally:
                over.set()
                for each in running:
                    result_of("an answer", each)

    def settle(self) -> None:
        """Wait until nothing is held any more; the node has proved its integrity."""
        wait_for("all slots back", self.running.idle)


_numbers = itertools.count()


@contextlib.contextmanager
def structured_cluster(folder: pathlib.Path, model: pathlib.Path, draft_tokens: bool) -> Iterator[StructuredCluster]:
    """Run a cluster, and a further gateway process for each policy but the first."""
    flags = (*FLAGS, "--speculative-config", str(speculative(4))) if draft_tokens else FLAGS
    flags += ("--tool-call-parser", "hermes", "--reasoning-parser", "deepseek_r1")
    with served(folder, str(model), *flags, faults=True) as running, contextlib.ExitStack() as stack:
        gateways = {policy: GatewayProcess(running, policy) for policy in POLICIES[1:]}
        for gateway in gateways.values():
            stack.callback(gateway.end)
            gateway.start()
        targets = [running.target, *(gateway.target for gateway in gateways.values())]
        for target in targets:
            wait_for("all gateways to serve", lambda target=target: knows_workers(target))
        clients = [stack.enter_context(Client(one, resume_timeout_s=RESULT_WITHIN_S)) for one in targets]
        yield StructuredCluster(running, dict(zip(POLICIES, clients, strict=True)), gateways)


def knows_workers(target: str) -> bool:
    """Return whether a gateway knows a worker of either kind."""
    with contextlib.suppress(PillionError), Client(target) as client:
        return {"prefill", "decode"} <= {component.role for component in client.status().components}
    return False


def save_thinking_model(folder: pathlib.Path) -> pathlib.Path:
    """Write the random model, which knows tools and reasoning; return ``folder``."""
    save_model(folder, vocab_size=VOCABULARY)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (THINK, END_THINK)])
    tokenizer.save(str(path))
    assert tokenizer.token_to_id(END_THINK) == VOCABULARY - 1
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


class GatewayProcess:
    """One more gateway process, with another split policy, before a cluster's workers."""

    def __init__(self, running: ServedCluster, policy: str) -> None:
        first, port = running.component("gateway"), free_port()
        assert first is not None
        own: dict[str, object] = {
            "split-policy": policy,
            "grpc-port": port,
            "http-port": 0,
            "component-id": f"gateway-{port}",
        }
        # The first gateway uses its own socket for health checks, which cannot be shared.
        own["probe-listen"] = f"unix:{running.folder}/gateway-{port}.sock"
        self._words = [*words_of(first), *(f"--{name}={value}" for name, value in own.items())]
        self._log = running.log
        # A forked component inherits its supervisor's environment, not the system's.
        redis_url = f"unix://{next(running.folder.rglob('redis.sock'))}"
        # Imports as in the cluster, whose board it uses.
        hooks = hook_environment(running.folder.parent / "board")
        self._environ = child_environ(os.environ, redis_url) | compute_environ(1) | hooks
        self._process: ForkedComponent | None = None
        self.target = f"127.0.0.1:{port}"

    def start(self) -> None:
        """Start the process."""
        self._process = shared_forks(self._environ).start(self._words, self._environ, self._log)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the process, and wait for its end."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(WITHIN_S)


def sessions(cases: Sequence[StructuredCase]) -> Iterator[tuple[bool, list[list[StructuredCase]]]]:
    """Yield groups of concurrent cases, by cluster, with a limited number of kills."""
    for draft_tokens, mine in itertools.groupby(
        sorted(cases, key=lambda case: case.draft_tokens), key=lambda case: case.draft_tokens
    ):
        batches: list[list[StructuredCase]] = []
        in_order = sorted(mine, key=lambda case: TROUBLES.index(case.trouble))
        for _, same in itertools.groupby(in_order, key=lambda case: case.trouble):
            batches += [list(each) for each in _chunks(list(same), CASES_AT_ONCE)]
        kills = [batch for batch in batches if batch[0].trouble in KILLED]
        others = [batch for batch in batches if batch[0].trouble not in KILLED]
        for part in _chunks(kills, KILLS_PER_CLUSTER) or [[]]:
            yield draft_tokens, others + part
            others = []


def _chunks(items: list[Any], size: int) -> list[list[Any]]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def judged(case: StructuredCase, got: Answers, wanted: Answers) -> str:
    """Return the error of a case's run; "" if none."""
    assert got.last is not None
    assert got.last.usage is not None
    assert got.last.timings is not None
    wrong = first_defect(case.shape, got, case.answers) or difference(wanted, got)
    if not wrong and case.trouble in KILLED and not got.last.timings.replays:
        return "nothing was replayed"
    if not wrong and case.trouble == "preempted" and not got.last.timings.preemptions:
        return "nothing was preempted"
    cached = (got.last.usage.prompt_tokens - 1) // 16 * 16 if case.prefix == "hit" else 0
    if not wrong and case.trouble == "none" and got.last.usage.cached_tokens != cached:
        return f"{got.last.usage.cached_tokens} tokens cached"
    return wrong


def run_structured(cases: Sequence[StructuredCase]) -> list[tuple[StructuredCase, str]]:
    """Run cases; return each with its error."""
    results = []
    wanted: dict[tuple[str, int], Answers] = {}
    with tempfile.TemporaryDirectory(prefix="pil-") as root:
        model = save_thinking_model(pathlib.Path(root, "tiny"))
        oracle = MaskedOracle(model)
        for number, (draft_tokens, batches) in enumerate(sessions(cases)):
            folder = pathlib.Path(root, str(number))
            folder.mkdir()
            with structured_cluster(folder, model, draft_tokens) as cluster:
                for case in itertools.chain.from_iterable(batches):
                    key = case.shape, case.answers
                    if key not in wanted:
                        wanted[key] = cluster.ask(case, f"reference {key}", Answers())
                        assert not first_defect(*key[:1], wanted[key], case.answers)
                        assert not oracle.difference(case.shape, wanted[key])
                for batch in batches:
                    for case, got in zip(batch, cluster.run_all(batch), strict=True):
                        wrong = judged(case, got, wanted[case.shape, case.answers])
                        print(f"{'ok ' if not wrong else 'BAD'} {case} {wrong}", flush=True)
                        results.append((case, wrong))
                cluster.settle()
    return results


def main() -> int:
    """Run the full matrix; the exit status is 0 where nothing was wrong."""
    os.environ.setdefault("PILLION_LOG_LEVEL", "warning")
    results = run_structured(full_matrix())
    bad = [case for case, wrong in results if wrong]
    print(f"{len(results) - len(bad)} of {len(results)} cases of structured answers are right")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
