"""Answers questions about a folder from a FAISS index, and prefers chunks whose KV the server has stored.

Start a server first: inlay serve demo. Then: python examples/retrieval/ask.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from hashlib import sha256
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from inlay.retrieval import CacheScorer, choose_cached, chunks, marked_parts

HERE = Path(__file__).parent
SYSTEM = {"role": "system", "content": "Answer from the documents."}
QUESTIONS = (
    "Who is the mayor of Bravel?",
    "How much does Tamor lamp cost?",
    "On which port does Kusol-gate listen?",
)


class Server:
    """An inlay server. ``key`` is its API key, None for a server without keys."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = key

    def call(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer to a POST."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.url}/v1/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def embed(self, texts: list[str]) -> np.ndarray:
        """Return unit vectors of texts, one a row."""
        data = self.call("embeddings", {"model": "demo", "input": texts, "pooling": "mean"})["data"]
        rows = np.array([row["embedding"] for row in data], np.float32)
        faiss.normalize_L2(rows)
        return rows


class ChunkIndex:
    """The chunks of a folder's text files by vector. A chunk's id is the start of its hash.

    Args:
        path: a folder for the index, which is made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self._vectors, self._texts = path / "vectors.faiss", path / "chunks.json"
        path.mkdir(parents=True, exist_ok=True)
        self.texts: dict[int, str] = {}
        self._index: Any = None
        if self._texts.exists():
            self.texts = {int(name): text for name, text in json.loads(self._texts.read_text("utf-8")).items()}
            self._index = faiss.read_index(str(self._vectors))

    def update(self, folder: Path, server: Server, *, least: int, most: int) -> tuple[int, int]:
        """Follow the files of a folder. Returns the numbers of embedded and of removed chunks."""
        files = sorted(folder.glob("*.txt"))
        if not files:
            raise SystemExit(f"{folder} holds no .txt files; name a folder that does")
        found = {_id(text): text for file in files for text in chunks(file.read_text("utf-8"), least=least, most=most)}
        new = [each for each in found if each not in self.texts]
        gone = [each for each in self.texts if each not in found]
        if new:
            vectors = server.embed([found[each] for each in new])
            if self._index is None:
                self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
            self._index.add_with_ids(vectors, np.array(new, np.int64))
        if gone:
            self._index.remove_ids(np.array(gone, np.int64))
        self.texts = found
        faiss.write_index(self._index, str(self._vectors))
        self._texts.write_text(json.dumps(self.texts), "utf-8")
        return len(new), len(gone)

    def search(self, vector: np.ndarray, count: int) -> tuple[list[str], list[float]]:
        """Return the most similar chunks and their cosines."""
        cosines, ids = self._index.search(vector[None], min(count, len(self.texts)))
        return [self.texts[each] for each in ids[0].tolist()], cosines[0].tolist()


def _id(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8]) >> 1  # FAISS's ids are signed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--folder", type=Path, default=HERE / "documents")
    parser.add_argument("--index", type=Path, default=Path("build/retrieval-index"), help="where the index is kept")
    parser.add_argument("--epsilon", type=float, default=0.02, help="the most cosine that a place may lose")
    parser.add_argument("--most", type=int, default=3, help="chunks of a prompt")
    parser.add_argument("--least-characters", type=int, default=130, help="of a chunk")
    parser.add_argument("--most-characters", type=int, default=400, help="of a chunk")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    given = parser.parse_args()

    server = Server(given.url, os.environ.get("INLAY_API_KEY"))
    scorer = CacheScorer(given.url, api_key=server.key, messages=[SYSTEM])
    index = ChunkIndex(given.index)
    embedded, removed = index.update(given.folder, server, least=given.least_characters, most=given.most_characters)
    print(f"{len(index.texts)} chunks, {embedded} embedded, {removed} removed")
    for question, vector in zip(given.questions, server.embed(list(given.questions)), strict=True):
        texts, cosines = index.search(vector, 4 * given.most)
        chosen = choose_cached(texts, cosines, scorer, epsilon=given.epsilon, most=given.most)
        message = {"role": "user", "content": marked_parts([texts[place] for place in chosen], question)}
        body = {"model": "demo", "messages": [SYSTEM, message], "max_tokens": 24, "temperature": 0}
        answer = server.call("chat/completions", body)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"{question} {answer['choices'][0]['message']['content'].strip()}")
        print(f"  {cached} tokens cached, {usage['prompt_tokens'] - cached} computed")


if __name__ == "__main__":
    main()
