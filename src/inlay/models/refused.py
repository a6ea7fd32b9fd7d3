"""Causal families of transformers that are refused, with the reason."""

from __future__ import annotations

#: Reason → model types.
REASONS: dict[str, tuple[str, ...]] = {
    "they are encoders or decoders of encoder-decoders, whose attention or positions are not those of a text alone": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus"),
        *("plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "they take images, sound or several streams beside the text, of which a text's states would not tell": (
        *("blt", "emu3", "fuyu", "gemma4_assistant", "gemma4_unified_assistant", "git"),
        *("got_ocr2", "mllama", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"),
        "phi4_multimodal",
    ),
    "they keep what they have read inside their modules, or nothing, so that requests cannot run side by side": (
        *("cpmant", "openai-gpt", "recurrent_gemma"),
    ),
}

REFUSED: dict[str, str] = {kind: reason for reason, kinds in REASONS.items() for kind in kinds}
