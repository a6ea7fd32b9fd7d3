"""Causal families of transformers that are refused, by what stands in the way of serving them."""

from __future__ import annotations

#: What a model does, and the model types that do it.
REASONS: dict[str, tuple[str, ...]] = {
    "they fold the text into states of fixed size, in all or some of their layers, so that nothing of it can be kept, "
    "shared or read apart from the rest": (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
        *("lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "rwkv"),
        *("xlstm", "zamba", "zamba2", "zaya"),
    ),
    "they are encoders or decoders of encoder-decoders, whose attention or positions are not those of a text alone": (
        *("bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot", "blenderbot-small"),
        *("camembert", "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus"),
        *("plbart", "prophetnet", "reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("trocr", "whisper", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
    ),
    "they take images, sound or several streams beside the text, of which a text's states would not tell": (
        *("blt", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_assistant", "gemma4_unified", "git"),
        *("gemma4_unified_assistant", "got_ocr2", "llama4", "mllama", "moshi", "moss_transcribe_diarize"),
        *("musicgen", "musicgen_melody", "phi4_multimodal"),
    ),
    "their attention chooses, mixes or shares keys in a way of its own, beside transformers' AttentionInterface": (
        *("cpmant", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "glm_moe_dsa", "hy_v4", "axk2"),
        *("minimax_m3_vl_text", "dots3_note", "dots3_note_text", "longcat_flash", "inkling_text", "inkling2_text"),
        *("gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_neox_japanese", "openai-gpt", "xglm", "codegen"),
        *("gptj", "jetmoe", "hrm_text", "llama4_text"),
    ),
    "their keys and values differ in width, which no backend stores yet": ("mimo_v2_flash",),
}

REFUSED: dict[str, str] = {kind: reason for reason, kinds in REASONS.items() for kind in kinds}
