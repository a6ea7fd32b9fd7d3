"""Published figures to compare experiments with, each with its table, figure or section.

Prompt Cache (Gim et al., arXiv 2311.04934) prints the results of figures 3, 4 and 9 to 13 as ranges only; these are
here. Its tables 1 and 3 are in eval/longbench/paper.py, table 2 is in inlay/authoring/memory.py.
ChunkAttention (Ye et al., arXiv 2402.15220): tables as printed, and the text's numbers on its figures.
The commentary is an article in Japanese on Prompt Cache (論文解説: Prompt Cache). Its tables are in no version of the
paper.
"""

from __future__ import annotations

from inlay_lab.reproduce.experiment import Published

PROMPT_CACHE = "Prompt Cache"
CHUNK_ATTENTION = "ChunkAttention"
COMMENTARY = "A commentary on Prompt Cache"

_CPUS = "Intel i9-13900K, AMD Ryzen 9 7950X"
_GPUS = "RTX 4090, A40, A100"
_A100 = "A100 80 GB"
_COMMENTED = "A100 40 GB"

CPU_TIMES_INTEL = Published(70.0, "§5.2.2, figure 4", "Intel i9-13900K, DDR5-5600")
CPU_TIMES_AMD = Published(20.0, "§5.2.2, figure 4", "AMD Ryzen 9 7950X, DDR4-3600")
CPU_TIMES = Published((9.3, 63.7), "§A.2, figures 12 and 13", _CPUS)
GPU_TIMES_HOST = Published((1.5, 3.1), "§5.2.1, §A.2, figures 3 and 9 to 11", _GPUS)
GPU_TIMES_DEVICE = Published((3.7, 11.7), "§5.2.1, §A.2, figures 3 and 9 to 11", _GPUS)

FULL_GROWS = Published("quadratic", "§5.4, figure 5", "i9-13900K, RTX 4090, A40")
CACHED_GROWS = Published("linear", "§5.4, figure 5", "i9-13900K, RTX 4090, A40")

#: §5.4: copying the attention states of 5K tokens, in milliseconds.
COPY_HOST_TO_HOST_MS = 3.79
COPY_HOST_TO_HOST = Published(COPY_HOST_TO_HOST_MS, "§5.4", "i9-13900K")
COPY_HOST_TO_DEVICE = Published(5.34, "§5.4", "RTX 4090 or A40")
COPY_DEVICE_TO_DEVICE = Published(0.23, "§5.4", "RTX 4090 or A40")

#: §5.4: added milliseconds from 7B to 13B at 3K tokens.
LARGER_ADDS_FULL = Published(220.0, "§5.4", "a GPU")
LARGER_ADDS_CACHED = Published(30.0, "§5.4", "a GPU")
LARGER_ADDS_RATIO = Published(round(220 / 30, 1), "§5.4, 220 ms by 30 ms", "a GPU")

#: §5.4: Llama 7B, 3K tokens, in milliseconds.
FIRST_FULL = Published(900.0, "§5.4", "RTX 4090")
FIRST_CACHED = Published(90.0, "§5.4", "RTX 4090")
FIRST_TIMES = Published(10.0, "§5.4, 900 ms by 90 ms", "RTX 4090")
LATER = Published(32.0, "§5.4", "RTX 4090")
TOKENS_GAINED = Published(25.0, "§5.4", "RTX 4090")
LATER_SAME = Published(1.0, "§5.4: the same with either", "RTX 4090")

CODE_TIMES = Published(4.0, "§5.6.1, figure 6", "a GPU")

#: ChunkAttention, table 1: batch → (million operations, million bytes, operations a byte, microseconds), each of the
#: query, key and value projections, self-attention, and the feed-forward layers.
ROOFLINE = {
    1: ((100.66, 100.70, 1.00, 88.44), (33.57, 33.85, 0.99, 17.82), (270.53, 270.62, 1.00, 160.77)),
    32: ((3221.23, 101.71, 31.67, 90.02), (1074.27, 1083.18, 0.99, 687.74), (8657.04, 273.43, 31.66, 209.82)),
    64: ((6442.45, 102.76, 62.69, 98.04), (2148.53, 2166.36, 0.99, 1358.40), (17314.09, 276.33, 62.66, 217.79)),
}
ROOFLINE_ON = _A100

#: ChunkAttention, table 3: (context tokens, shared ones) → microseconds of naive PyTorch, xformers, FlashAttention,
#: PagedAttention, PagedAttention over shared pages (PagedAttn*), and ChunkAttention.
KERNELS = {
    (1024, 0): (363.35, 378.19, 1586.73, 356.17, 355.82, 332.50),
    (1024, 512): (364.73, 385.79, 1587.14, 355.88, 257.74, 198.87),
    (1024, 768): (362.43, 378.50, 1591.61, 356.02, 215.18, 131.21),
    (1024, 1024): (361.76, 379.36, 1586.90, 355.44, 154.46, 56.00),
    (2048, 0): (686.40, 816.44, 3175.25, 702.98, 703.50, 655.44),
    (2048, 1024): (687.52, 828.76, 3173.53, 703.35, 505.32, 384.37),
    (2048, 1536): (685.78, 820.19, 3174.96, 702.90, 421.25, 247.14),
    (2048, 2048): (688.41, 823.60, 3152.25, 703.72, 338.41, 110.48),
    (4096, 0): (1369.52, 1720.00, 6289.55, 1400.61, 1400.17, 1301.78),
    (4096, 2048): (1370.47, 1722.42, 6303.21, 1400.99, 998.78, 747.56),
    (4096, 3072): (1369.74, 1725.57, 6301.41, 1400.30, 828.98, 477.66),
    (4096, 4096): (1370.41, 1713.13, 6300.65, 1399.51, 663.84, 206.22),
}
KERNEL_ON = _A100

#: §4.1 on figure 3, 2,048 shared tokens: by tokens of each answer, the rate over PagedAttn*'s and over PagedAttn's.
DIVERGED = {
    512: (Published(2.0, "§4.1, figure 3", _A100), Published(3.6, "§4.1, figure 3", _A100)),
    2048: (Published(1.5, "§4.1, figure 3", _A100), Published(2.3, "§4.1, figure 3", _A100)),
}
#: §4.1 on figure 4, 2,048 shared tokens: growth of the rate from a batch of 16 to 96 (155K to 224K tokens/s).
BATCH_GROWS = Published(round(224 / 155, 2), "§4.1, figure 4, 155K to 224K tokens/s", _A100)

#: §4.2 on figure 5: rate of requests at 40 ms a token over vLLM's, by shared tokens.
THROUGHPUT_TIMES = {
    1024: Published(1.6, "§4.2, figure 5, 2.9 by 1.8 requests/s", _A100),
    2048: Published(2.3, "§4.2, figure 5, 2.3 by 1.0 requests/s", _A100),
}
#: Table 4, fully shared prompts: vLLM's normalized latency over ChunkLlama's, and the saved KV.
LATENCY_TIMES = {
    1024: Published(round(20.80 / 14.07, 2), "table 4, 20.80 by 14.07 ms/token", _A100),
    2048: Published(round(21.61 / 15.20, 2), "table 4, 21.61 by 15.20 ms/token", _A100),
    4096: Published(round(27.62 / 17.16, 2), "table 4, 27.62 by 17.16 ms/token", _A100),
}
KV_SAVED = {
    1024: Published(round(100 * (1 - 3.28 / 14.79)), "table 4, 14.79 to 3.28 GB", _A100),
    2048: Published(round(100 * (1 - 3.40 / 21.09)), "table 4, 21.09 to 3.40 GB", _A100),
    4096: Published(round(100 * (1 - 4.00 / 35.42)), "table 4, 35.42 to 4.00 GB", _A100),
}

#: The commentary: speedup of the first token, for questions about documents, by hit rate in percent.
HIT_RATE_TIMES = {
    0: Published(1.0, "hit rates", _COMMENTED),
    25: Published(1.3, "hit rates", _COMMENTED),
    50: Published(1.8, "hit rates", _COMMENTED),
    75: Published(2.6, "hit rates", _COMMENTED),
    90: Published(3.9, "hit rates", _COMMENTED),
    95: Published(4.5, "hit rates", _COMMENTED),
}
#: The commentary: ratio of requests a second to those without a cache, with the overlap in percent.
WORKLOAD_TIMES = {
    "documents": (95, Published(round(7.9 / 2.1, 1), "throughput, document QA, 7.9 by 2.1", _COMMENTED)),
    "passages": (65, Published(round(10.3 / 2.8, 1), "throughput, RAG, 10.3 by 2.8", _COMMENTED)),
    "summaries": (95, Published(round(28.5 / 4.2, 1), "throughput, summaries, 28.5 by 4.2", _COMMENTED)),
}
#: The commentary: total gigabytes by number of stored documents of 2,000 tokens, Llama-2 7B.
DOCUMENTS_GB = {0: 13.2, 10: 14.1, 50: 16.8, 100: 19.3}
DOCUMENT_MB = Published(round(1000 * (19.3 - 13.2) / 100), "memory, 13.2 to 19.3 GB with 100", _COMMENTED)
EXACT_MATCH_BASE = Published(42.3, "quality, NaturalQuestions", _COMMENTED)
EXACT_MATCH_CACHED = Published(42.2, "quality, NaturalQuestions", _COMMENTED)
NOT_SIGNIFICANT = Published("no", "quality: p > 0.05, a paired t-test", _COMMENTED)
