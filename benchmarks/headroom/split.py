"""Which traces are for what, fixed by name.

The constants of an earlier rule were chosen on TUNING, then with an eye on HELD_OUT and
FRESH; UNTOUCHED was recorded when they were settled.  The present rule was chosen on
all of them.
"""

TUNING = (
    "mlp_classify", "mlp_regress_big", "field_1", "field_1e-3", "feature_grid",
    "bandit", "gru_recall", "deep_narrow", "char_gpt", "autoencoder",
    "skipgram", "gan", "convnet", "small_batch", "warm_lr", "deep_sigmoid",
    "rnn_long", "grid_levels", "overfit", "experts", "gpt_deep",
)  # fmt: skip
HELD_OUT = (
    "field_1e-5", "bce512", "contrastive", "deep_resmlp", "rnn_add",
    "conv_denoise", "heavy_tail", "actor_critic", "sum_loss", "gpt_copy",
    "gru_long", "sigmoid_ae", "memorize",
)  # fmt: skip
FRESH = (
    "fresh_gpt", "fresh_gpt_wide", "fresh_quantile", "fresh_physics",
    "fresh_field_1e-2", "fresh_conv", "fresh_rank", "fresh_gru",
)  # fmt: skip
UNTOUCHED = (
    "last_gpt", "last_field_1e-4", "last_flow", "last_graph", "last_value",
    "last_unet",
)  # fmt: skip
ALL = TUNING + HELD_OUT + FRESH + UNTOUCHED
