"""How fast is a checkpoint loaded from the disk, beside the disk itself?

    python lab/benchmarks/load.py --layers 12

It writes a checkpoint of Llama-2-7B's layers with random weights (bf16; 0.40 GB a layer, 0.26 GB each for embedding and
head) and drops it from the page cache before each run. It measures the disk alone (large reads by the best number of
threads), a load with a known fingerprint, a first load, which hashes every byte too, and a load from memory. The last
line of stdout is one JSON object. Only Linux can drop a file from its cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from inlay.models.load import load_model
from inlay.models.random import SHAPES, bytes_tokenizer
from inlay_lab.bench.machine import describe_machine

BLOCK = 8 << 20
THREADS = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of 32; the checkpoint has to fit into memory twice")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", help="on the disk that is measured; a temporary one if not given")
    parser.add_argument("--quantization", help="int8 or int4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="inlay-load-") as place:
        os.environ["INLAY_CACHE_ROOT"] = str(Path(place) / "cache")
        folder = Path(place) / "checkpoint"
        size = write(folder, arguments.layers)
        print(f"{size / 1e9:.2f} GB in {len(shards(folder))} files")
        print(json.dumps(measured(folder, size, arguments.runs, arguments.quantization), indent=None))


def measured(folder: Path, size: int, runs: int, quantization: str | None) -> dict[str, object]:
    """Median rates in GB/s, measured in turns."""
    seconds: dict[str, list[float]] = {"first": [], "known": [], "in memory": []}
    processor: dict[str, list[float]] = {name: [] for name in seconds}

    def timed(name: str) -> None:
        before = time.process_time()
        seconds[name].append(loaded(folder, quantization))
        processor[name].append(time.process_time() - before)

    disk: dict[int, list[float]] = {threads: [] for threads in THREADS}
    time.sleep(3)  # files that have just changed leave no record of their fingerprint
    for _ in range(runs):
        for threads in THREADS:
            drop(folder)
            disk[threads].append(read(folder, threads))
        forget(folder)
        drop(folder)
        timed("first")
        drop(folder)
        timed("known")
        timed("in memory")
    best = max(size / statistics.median(times) for times in disk.values())
    rates = {name: size / statistics.median(times) for name, times in seconds.items()}
    return {
        "gb": round(size / 1e9, 2),
        "disk_gb_s": round(best / 1e9, 3),
        **{f"{name.replace(' ', '_')}_gb_s": round(rate / 1e9, 3) for name, rate in rates.items()},
        "known_of_disk": round(rates["known"] / best, 3),
        "first_of_disk": round(rates["first"] / best, 3),
        "processor_s": {name: round(statistics.median(times), 2) for name, times in processor.items()},
        "quantization": quantization,
        "machine": describe_machine(),
    }


def write(folder: Path, layers: int) -> int:
    """Write the checkpoint, a shard for every four layers. Returns the bytes of its weights."""
    settings = SHAPES["llama-2-7b"] | {"num_hidden_layers": layers, "dtype": "bfloat16"}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    bytes_tokenizer().save_pretrained(folder)
    width, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    noise = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()

    def drawn(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return noise.repeat(-(-count // len(noise)))[:count].view(shape)

    sizes = {f"self_attn.{name}_proj": (width, width) for name in "qkvo"}
    sizes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    names: dict[str, str] = {}
    total = 0
    for begin in range(0, layers, 4):
        shard: dict[str, torch.Tensor] = {}
        for layer in range(begin, min(begin + 4, layers)):
            stem = f"model.layers.{layer}"
            shard |= {f"{stem}.{name}.weight": drawn(*shape) for name, shape in sizes.items()}
            norms = ("input_layernorm", "post_attention_layernorm")
            shard |= {f"{stem}.{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
        if begin == 0:
            shard["model.embed_tokens.weight"] = drawn(words, width)
        if begin + 4 >= layers:
            shard |= {
                "model.norm.weight": torch.ones(width, dtype=torch.bfloat16),
                "lm_head.weight": drawn(words, width),
            }
        file = f"model-{begin // 4 + 1:05}-of-{-(-layers // 4):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def drop(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in shards(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def forget(folder: Path) -> None:
    """Delete inlay's record of the fingerprint."""
    for record in (folder.parent / "cache" / "fingerprints").glob("*.json"):
        record.unlink()


def read(folder: Path, threads: int) -> float:
    """Seconds to read all files into buffers."""
    blocks = [(path, at) for path in shards(folder) for at in range(0, path.stat().st_size, BLOCK)]
    files = {path: os.open(path, os.O_RDONLY) for path in shards(folder)}
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda block: len(os.pread(files[block[0]], BLOCK, block[1])), blocks):
            pass
    seconds = time.perf_counter() - started
    for file in files.values():
        os.close(file)
    return seconds


def loaded(folder: Path, quantization: str | None) -> float:
    """Seconds of a load."""
    started = time.perf_counter()
    load_model(folder, quantization=quantization)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
