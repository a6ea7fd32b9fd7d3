"""The part of llama.cpp's library that the benchmarks use, over a list of cells as in its unified KV cache.

The next token is a digest of all tokens of a sequence, so a wrong or missing token shows in the answer.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VOCABULARY = 997
llama_token = ctypes.c_int32


@dataclass
class State:
    """A context: its parameters, its cells of (position, token, sequences), and counts of them.

    Attributes:
        recurrent: As a recurrent model, it cannot go back to an earlier token.
    """

    params: Any
    recurrent: bool = False
    cells: list[tuple[int, int, set[int]]] = field(default_factory=list)
    computed: int = 0
    most_cells: int = 0
    logits: dict[int, int] = field(default_factory=dict)

    def ids(self, sequence: int) -> list[int]:
        held = sorted((position, token) for position, token, sequences in self.cells if sequence in sequences)
        assert [position for position, _ in held] == list(range(len(held))), "a position is missing or there twice"
        return [token for _, token in held]


def next_token(ids: list[int]) -> int:
    digest = 1
    for token in ids:
        digest = (digest * 31 + token + 1) % VOCABULARY
    return digest


def answer(ids: list[int], tokens: int) -> list[int]:
    """The answer that these functions lead to."""
    said: list[int] = []
    for _ in range(tokens):
        said.append(next_token([*ids, *said]))
    return said


def llama_log_callback(call: Any) -> Any:
    return call


def llama_log_set(callback: Any, data: Any) -> None:
    print("a line of its log")


def llama_backend_init() -> None:
    pass


def llama_model_default_params() -> Any:
    return SimpleNamespace()


llama_context_default_params = llama_model_default_params


def llama_model_load_from_file(file: bytes, params: Any) -> bytes | None:
    return file if Path(file.decode()).read_bytes()[:4] == b"GGUF" else None


def llama_init_from_model(model: bytes, params: Any) -> State:
    assert params.n_seq_max > 1
    assert params.kv_unified is True
    assert params.n_threads == params.n_threads_batch > 0
    return State(params)


def llama_get_memory(state: State) -> State:
    return state


def llama_model_get_vocab(model: bytes) -> None:
    pass


def llama_vocab_n_tokens(vocabulary: None) -> int:
    return VOCABULARY


def llama_batch_init(cells: int, embedding: int, sequences: int) -> Any:
    lists = {name: [0] * cells for name in ("token", "pos", "logits", "n_seq_id")}
    return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(cells)], **lists)


def llama_memory_clear(memory: State, data: bool) -> None:
    memory.cells = []


def llama_memory_seq_rm(memory: State, sequence: int, first: int, end: int) -> bool:
    assert end == -1
    if memory.recurrent and 0 < first < len(memory.ids(sequence)):
        return False
    for position, _, sequences in memory.cells:
        if position >= first:
            sequences.discard(sequence)
    memory.cells = [cell for cell in memory.cells if cell[2]]
    return True


def llama_memory_seq_cp(memory: State, source: int, target: int, first: int, end: int) -> None:
    assert first == 0
    assert not memory.ids(target)
    for position, _, sequences in memory.cells:
        if source in sequences and position < end:
            sequences.add(target)


def llama_decode(state: State, batch: Any) -> int:
    state.logits = {}
    for at in range(batch.n_tokens):
        assert batch.n_seq_id[at] == 1
        assert batch.seq_id[at][0] < state.params.n_seq_max
        state.cells.append((batch.pos[at], batch.token[at], {batch.seq_id[at][0]}))
        state.computed += 1
        if batch.logits[at]:
            state.logits[at] = next_token(state.ids(batch.seq_id[at][0]))
    state.most_cells = max(state.most_cells, len(state.cells))
    assert state.most_cells <= state.params.n_ctx
    return 0


def llama_synchronize(state: State) -> None:
    pass


def llama_get_logits_ith(state: State, at: int) -> Any:
    numbers = (ctypes.c_float * VOCABULARY)()
    numbers[state.logits[at]] = 1.0
    return ctypes.cast(numbers, ctypes.POINTER(ctypes.c_float))


def llama_state_seq_save_file(state: State, file: bytes, sequence: int, tokens: Any, count: int) -> int:
    assert list(tokens) == state.ids(sequence)
    assert len(tokens) == count
    return Path(file.decode()).write_text(json.dumps(state.ids(sequence)))


def llama_state_seq_load_file(state: State, file: bytes, sequence: int, tokens: Any, most: int, count: Any) -> int:
    text = Path(file.decode()).read_text()
    try:
        ids = json.loads(text)
    except ValueError:
        return 0
    assert len(ids) <= most
    assert not state.ids(sequence)
    state.cells += [(at, token, {sequence}) for at, token in enumerate(ids)]
    tokens[: len(ids)] = ids
    ctypes.cast(count, ctypes.POINTER(ctypes.c_size_t))[0] = len(ids)
    return len(text)
