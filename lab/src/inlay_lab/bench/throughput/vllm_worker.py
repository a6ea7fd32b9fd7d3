"""Many requests in vLLM: ``python -m inlay_lab.bench.throughput.vllm_worker FOLDER MOST LONGEST SHARE``.

MOST requests of LONGEST tokens run at once over the checkpoint in FOLDER, in SHARE of the device's memory. Every line
on standard input is JSON, ``{"asks": [{"ids": …, "at": seconds}, …], "tokens": n, "within_s": …}``. It empties the
prefix cache and answers with a line of JSON: the tokens of each request, and the seconds from the question to each of
them, or ``{"late": true}`` after ``within_s``. The first line reports that the model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from importlib import import_module
from typing import Any


class Requests:
    """vLLM with a model, stepped here so that the time of every token is known."""

    def __init__(self, folder: str, most: int, longest: int, share: float) -> None:
        self._vllm: Any = import_module("vllm")
        self._llm = self._vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_num_seqs=most,
            max_model_len=longest,
            gpu_memory_utilization=share,
            seed=0,
        )
        self._asked = 0

    def answer(self, asks: list[dict[str, Any]], tokens: int, within_s: float) -> dict[str, Any]:
        """Generate ``tokens`` tokens of each prompt, greedily."""
        engine = self._llm.llm_engine
        self._llm.reset_prefix_cache()
        params = self._vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = [str(self._asked + number) for number in range(len(asks))]
        self._asked += len(asks)
        answers: dict[str, dict[str, list[Any]]] = {name: {"ids": [], "seconds": []} for name in names}
        waiting, started = deque(zip(names, asks, strict=True)), time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            now = time.perf_counter() - started
            if now > within_s:
                engine.abort_request(names)
                return {"late": True}
            while waiting and waiting[0][1]["at"] <= now:
                name, ask = waiting.popleft()
                engine.add_request(name, {"prompt_token_ids": ask["ids"]}, params)
            if not engine.has_unfinished_requests():
                time.sleep(waiting[0][1]["at"] - now)
                continue
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                answer = answers[output.request_id]
                answer["ids"] = list(output.outputs[0].token_ids)
                answer["seconds"] += [now] * (len(answer["ids"]) - len(answer["seconds"]))
        return {"answers": [answers[name] for name in names]}


def main(folder: str, most: int, longest: int, share: float) -> None:
    """Serve questions until standard input ends."""
    with os.fdopen(os.dup(1), "w") as said:
        os.dup2(2, 1)  # vLLM's log would mix with the answers on standard output

        def say(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=said, flush=True)

        try:
            requests = Requests(folder, most, longest, share)
            say({"loaded": True})
            for line in sys.stdin:
                asked = json.loads(line)
                say(requests.answer(asked["asks"], asked["tokens"], asked["within_s"]))
        except Exception as error:  # whatever its reason is, it is reported
            say({"error": f"vLLM: {type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
