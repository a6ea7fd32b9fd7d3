"""The bundled model ``demo``: the generator of its documents, its recipe, and its files in ``model/``."""

from pathlib import Path

MODEL_DIRECTORY = Path(__file__).parent / "model"
