"""The part of vLLM's interface that the benchmarks use, over the checkpoint that it is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

print("a line of its log")


class SamplingParams:
    def __init__(self, *, temperature: float, max_tokens: int, ignore_eos: bool, detokenize: bool) -> None:
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        self.max_tokens = max_tokens


class LLM:
    """Without compilation, it gives one token too few."""

    def __init__(self, *, model: str, max_num_seqs: int, max_model_len: int, enforce_eager: bool, **more: Any) -> None:
        if "STAND_IN_FAILS" in os.environ:
            raise RuntimeError("no room\nfor it")
        expected: dict[str, Any] = {"skip_tokenizer_init": True, "enable_prefix_caching": True, "seed": 0}
        if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
            assert os.environ["VLLM_CPU_OMP_THREADS_BIND"].startswith("0-")
            expected |= {"dtype": "float32"}
        else:
            expected |= {"dtype": "auto", "gpu_memory_utilization": 0.85}
        assert more.pop("load_format") == "auto"
        assert list(Path(model).glob("*.safetensors"))
        assert more == expected
        factory: Any = AutoModelForCausalLM
        self.model, self.most, self.longest = factory.from_pretrained(model), max_num_seqs, max_model_len
        self.short = enforce_eager
        self.llm_engine, self.resets = self, 0
        self.running: dict[str, Any] = {}

    def generate(self, prompts: Sequence[Any], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        assert len(prompts) <= self.most
        params.max_tokens -= self.short and params.max_tokens > 1
        for number, prompt in enumerate(prompts):
            self.add_request(f"generate-{number}", prompt, params)
        outputs: dict[str, Any] = {}
        while self.running:
            outputs |= {output.request_id: output for output in self.step()}
        return list(outputs.values())

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    def add_request(self, name: str, prompt: Any, params: SamplingParams) -> None:
        assert name not in self.running
        if name.isdigit():
            assert int(name) // 3 + 1 == self.resets, "each run has three requests, and forgets first"
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.longest
        self.running[name] = [list(prompt["prompt_token_ids"]), [], params.max_tokens]

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def step(self) -> list[Any]:
        print("another line")
        outputs = []
        for name, (ids, said, most) in list(self.running.items())[: self.most]:
            with torch.inference_mode():
                said.append(int(self.model(torch.tensor([ids + said])).logits[0, -1].argmax()))
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tuple(said))]))
            if len(said) == most:
                del self.running[name]
        return outputs
