"""GPU experiments, read from stored runs of ``lab/benchmarks/gpu`` with the device's name.

A folder has one subfolder for each device, with ``attention.json`` and ``prompt_cache.json`` from
``lab/benchmarks/gpu/run.sh``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inlay.errors import ParameterError
from inlay.strict_json import JSONError, read_json
from inlay.wording import listed
from inlay_lab.reproduce import published
from inlay_lab.reproduce.experiment import NotHereError, Outcome, Published, Row, Settings, Table

_MOST_BYTES = 64 * 2**20  # of a file


def measure_gpu_first_token(settings: Settings) -> Outcome:
    """Prompt Cache, figures 3 and 9 to 11 and §5.4: modules in device memory, and copied from the host's."""
    rows, lines, devices = [], [], []
    for device, found in _runs(settings, "prompt_cache"):
        devices.append(device)
        for row in found:
            ms, times = row["ms"], row["times_as_fast"]
            lines.append(
                [
                    *(device, row["model"], f"{row['cached']:,}", f"{row['new']:,}"),
                    *(f"{ms[name]:,.1f}" for name in ("full", "host", "device")),
                    *(f"{times[name]:.1f}×" for name in ("host", "device")),
                ]
            )
        for where, printed in (("host", published.GPU_TIMES_HOST), ("device", published.GPU_TIMES_DEVICE)):
            ratios = [row["times_as_fast"][where] for row in found if row["model"].endswith("llama-2-7b")]
            for what, ratio in (("lowest", min(ratios, default=None)), ("highest", max(ratios, default=None))):
                rows.append(
                    Row(f"{device}, modules in {where} memory: times as fast, {what}", "×", ratio, printed, _LENGTHS)
                )
        rows += _copies(device, found)
    header = [
        "device",
        "model",
        "cached",
        "new",
        "full prefill, ms",
        "from host, ms",
        "on device, ms",
        "host ×",
        "device ×",
    ]
    return Outcome(rows, [Table("Milliseconds to the first token", header, lines)], [_stored(settings, devices)])


_LENGTHS = "another device, and prompts from 1,024 to 16,384 tokens where the paper's average 5K"


def _copies(device: str, found: list[dict[str, Any]]) -> Iterator[Row]:
    for row in found:
        if row["model"].endswith("llama-2-7b") and 4_500 < row["cached"] < 5_500:
            ms = row["ms"]["host"] - row["ms"]["device"]
            gib = row["module_bytes"] / 2**30
            why = f"ours copies all layers, {gib:.2f} GiB; the paper's figure fits one layer (see `copies`)"
            yield Row(f"{device}: host to device", "ms", ms, published.COPY_HOST_TO_DEVICE, why)
            yield Row(
                f"{device}: device to device", "ms", 0.0, published.COPY_DEVICE_TO_DEVICE, "modules are read in place"
            )
            return


def measure_gpu_kernels(settings: Settings) -> Outcome:
    """ChunkAttention, table 3 on a GPU; the table includes figures 3 and 4."""
    rows, lines, devices = [], [], []
    for device, found in _runs(settings, "attention"):
        devices.append(device)
        for row in found:
            us = row["us"]
            lines.append(
                [
                    *(device, row["part"], row["dtype"], f"{row['heads']}/{row['kv_heads']}"),
                    *(f"{row[name]:,}" for name in ("batch", "context", "shared")),
                    *("" if us.get(name) is None else f"{us[name]:,.1f}" for name in _KERNELS),
                ]
            )
            printed = published.KERNELS.get((row["context"], row["shared"]))
            alike = row["part"] == "table3" and row["dtype"] == "float16" and row["heads"] == row["kv_heads"] == 32
            if printed is None or not alike or None in (us.get("shared"), us.get("paged")):
                continue
            where = f"{device}, {row['context']:,} tokens, {row['shared']:,} shared"
            told = Published(printed[5], "table 3", published.KERNEL_ON)
            rows.append(Row(f"{where}: ours", "µs", us["shared"], told, "another device"))
            told = Published(round(printed[4] / printed[5], 2), "table 3", published.KERNEL_ON)
            rows.append(Row(f"{where}: times as fast as PagedAttn*", "×", us["paged"] / us["shared"], told, _CACHES))
    header = ["device", "part", "dtype", "heads", "batch", "context", "shared", "ours, µs", "PagedAttn*, µs"]
    header += ["sdpa, µs", "flex, µs"]
    return Outcome(rows, [Table("One decode step of one layer", header, lines)], [_stored(settings, devices)])


_KERNELS = ("shared", "paged", "sdpa", "flex")
_CACHES = "another device, whose cache keeps more or less of what is shared"


def _stored(settings: Settings, devices: list[str]) -> str:
    return f"Not measured now: stored runs of {listed(devices)}, read from {settings['stored']}."


def _runs(settings: Settings, script: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Device and rows of every stored run. Raises NotHereError without one, ParameterError for a damaged one."""
    folder = settings.get("stored")
    files = [] if folder is None else sorted(Path(folder).glob(f"*/{script}.json"))
    read = [(path, _read(path)) for path in files]
    found = [(str(each["device"]), _rows(path, each)) for path, each in read if not each["dry"]]
    if not found:
        where = "no folder of stored runs was given" if folder is None else f"{folder} has no stored run of a device"
        raise NotHereError(
            f"it needs a GPU, and {where}; run lab/benchmarks/gpu/run.sh on a machine with one, and give --stored with "
            "the folder of its results"
        )
    return found


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ParameterError(f"{path} is larger than 64 MiB, which no stored run is; take it out of the folder")
        found = read_json(path.read_bytes(), max_depth=16)
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}); check who may read it") from None
    except JSONError as error:
        raise ParameterError(
            f"{path} is no stored run ({error}); measure it again with lab/benchmarks/gpu/run.sh"
        ) from None
    if not (isinstance(found, dict) and {"device", "dry", "rows"} <= found.keys() and isinstance(found["rows"], list)):
        raise ParameterError(f"{path} is no stored run of lab/benchmarks/gpu; take it out of the folder")
    return found


_FIELDS = {
    "prompt_cache": {"model", "cached", "new", "ms", "times_as_fast", "module_bytes"},
    "attention": {"part", "dtype", "heads", "kv_heads", "batch", "context", "shared", "us"},
}


def _rows(path: Path, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = list(found["rows"])
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not row.keys() >= _FIELDS[path.stem]:
            raise ParameterError(f"{path}, row {number}: it lacks fields of a stored run; measure it again")
    return rows
