"""Small models of transformers: for each name of a configuration the class and what makes it small."""

from __future__ import annotations

from typing import Any

_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {
    **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    # The default, grouped_mm, has no kernel for float64.
    "experts_implementation": "batched_mm",
}  # fmt: skip
_HALVES = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
}  # fmt: skip
_LOCAL = {
    **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "experts_implementation": "batched_mm",
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_labels": 5}
_HEADS = {"num_attention_heads": [1, 1, 2, 2]}
_PATCHES = {"image_size": 16, "patch_size": 4, "num_labels": 5}
TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "big_bird": ("BigBirdForMaskedLM", {"attention_type": "original_full"}),
    "biogpt": ("BioGptForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", _GROUPED),
    "blenderbot": ("BlenderbotForConditionalGeneration", _HALVES),
    "camembert": ("CamembertForMaskedLM", {}),
    "codegen": ("CodeGenForCausalLM", {**_GPT, "rotary_dim": 4, "n_ctx": 32}),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "cohere2": ("Cohere2ForCausalLM", {**_GROUPED, "sliding_window": 4}),
    "convbert": ("ConvBertForMaskedLM", {"embedding_size": 32, "conv_kernel_size": 3}),
    "ctrl": ("CTRLLMHeadModel", {**_GPT, "dff": 48}),
    "deberta": ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "first_k_dense_replace": 1, "experts_implementation": "batched_mm", "n_group": 1, "topk_group": 1,
    }),
    "ernie": ("ErnieForMaskedLM", {}),
    "esm": ("EsmForMaskedLM", {"token_dropout": False, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    "exaone4": ("Exaone4ForCausalLM", _GROUPED),
    "falcon": ("FalconForCausalLM", {"num_ln_in_parallel_attn": 1}),
    "falcon_mamba": ("FalconMambaForCausalLM", {"state_size": 4, "time_step_rank": 4}),
    "fnet": ("FNetForMaskedLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "gemma3_text": ("Gemma3ForCausalLM", {**_GROUPED, "head_dim": 8, "sliding_window": 4}),
    "glm4": ("Glm4ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", _GPT),
    "gpt_oss": ("GptOssForCausalLM", {**_LOCAL, "sliding_window": 4}),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "granite": ("GraniteForCausalLM", _GROUPED),
    "helium": ("HeliumForCausalLM", {**_GROUPED, "head_dim": 8}),
    "ibert": ("IBertForMaskedLM", {}),
    "jamba": ("JambaForCausalLM", {
        **_GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        "experts_implementation": "batched_mm",
    }),
    "lfm2": ("Lfm2ForCausalLM", {**_GROUPED, "layer_types": ["conv", "full_attention"]}),
    "luke": ("LukeForMaskedLM", {"entity_vocab_size": 8, "entity_emb_size": 8}),
    "m2m_100": ("M2M100ForConditionalGeneration", _HALVES),
    "mamba": ("MambaForCausalLM", {"state_size": 4, "time_step_rank": 4}),
    "mamba2": ("Mamba2ForCausalLM", {
        "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4, "expand": 2,
    }),
    "marian": ("MarianMTModel", _HALVES),
    "mbart": ("MBartForConditionalGeneration", _HALVES),
    "minimax": ("MiniMaxForCausalLM", {**_LOCAL, "block_size": 4}),
    "mobilebert": ("MobileBertForMaskedLM", {
        "embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 2,
    }),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 4, "global_attn_every_n_layers": 2}),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 1, "max_seq_len": 32}),
    "mt5": ("MT5ForConditionalGeneration", {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0,
    }),
    "nemotron": ("NemotronForCausalLM", {**_GROUPED, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "olmoe": ("OlmoeForCausalLM", _EXPERTS),
    "openai-gpt": ("OpenAIGPTLMHeadModel", _GPT),
    "pegasus": ("PegasusForConditionalGeneration", _HALVES),
    "persimmon": ("PersimmonForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}),
    "qwen3_next": ("Qwen3NextForCausalLM", {
        **_EXPERTS, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "rembert": ("RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 16}),
    "roformer": ("RoFormerForMaskedLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", _GROUPED),
    "squeezebert": ("SqueezeBertForMaskedLM", {"embedding_size": 32}),
    "stablelm": ("StableLmForCausalLM", _GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", _GROUPED),
    "xlm-roberta": ("XLMRobertaForMaskedLM", {}),
}  # fmt: skip
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("BeitForImageClassification", _PATCHES),
    "convnext": ("ConvNextForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 5, "image_size": 16,
    }),
    "deit": ("DeiTForImageClassification", _PATCHES),
    "dinov2": ("Dinov2ForImageClassification", _PATCHES),
    "focalnet": ("FocalNetForImageClassification", {
        "image_size": 16, "embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1], "focal_windows": [3, 3],
        "hidden_sizes": [8, 16], "num_labels": 5,
    }),
    "hiera": ("HieraForImageClassification", {
        "image_size": [16, 16], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1,
        "masked_unit_size": [2, 2], "query_stride": [2, 2], "patch_size": [3, 3], "patch_stride": [2, 2],
        "patch_padding": [1, 1], "num_labels": 5,
    }),
    "poolformer": ("PoolFormerForImageClassification", _STAGES),
    "pvt": ("PvtForImageClassification", {**_STAGES, **_HEADS, "image_size": 32}),
    "resnet": ("ResNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5,
    }),
    "segformer": ("SegformerForImageClassification", {**_STAGES, **_HEADS}),
}  # fmt: skip
