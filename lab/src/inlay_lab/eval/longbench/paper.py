"""Results of the Prompt Cache paper (arXiv 2311.04934, Table 3; Table 1 has eight of its rows)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: The columns of the paper's table; each has a baseline and Prompt Cache's result.
MODELS = ("Llama2 7B", "Llama2 13B", "MPT 7B", "Falcon 7B")

#: Above this difference the paper prints the higher of two figures in bold.
OUTLIER = 2.5

#: By dataset: baseline and cached, model by model. The paper does not name the language of datasets that have two.
PUBLISHED: Mapping[str, tuple[tuple[float, float], ...]] = MappingProxyType(
    {
        "narrativeqa": ((19.93, 19.38), (20.37, 19.94), (10.43, 11.33), (7.14, 8.87)),
        "qasper": ((17.98, 19.31), (20.90, 17.79), (10.08, 13.71), (10.64, 8.90)),
        "multifieldqa_en": ((28.61, 29.64), (32.12, 32.37), (25.15, 27.45), (17.49, 16.65)),
        "hotpotqa": ((18.32, 19.34), (22.21, 23.35), (18.97, 20.11), (12.37, 13.22)),
        "2wikimqa": ((16.63, 13.95), (14.59, 17.69), (10.44, 13.70), (14.42, 15.07)),
        "musique": ((7.31, 8.57), (10.03, 12.14), (7.38, 7.32), (4.81, 5.86)),
        "gov_report": ((24.67, 25.37), (28.13, 28.18), (26.96, 27.49), (22.39, 23.40)),
        "qmsum": ((19.24, 19.46), (18.80, 18.82), (15.19, 15.51), (12.84, 12.96)),
        "multi_news": ((24.33, 24.22), (25.43, 26.23), (25.42, 25.66), (20.91, 21.19)),
        "triviaqa": ((13.04, 12.33), (23.19, 22.38), (10.57, 9.17), (13.31, 11.42)),
        "passage_count": ((3.33, 4.00), (2.26, 2.95), (1.53, 1.81), (1.55, 1.59)),
        "passage_retrieval_en": ((7.50, 4.25), (9.08, 6.50), (3.03, 3.85), (3.00, 3.45)),
    }
)
