"""The dtype that autocast runs each operation in, and the effect of other operations on the dtype.

The lists are torch 2.13's `ATen/autocast_mode.h` (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`,
`AT_FORALL_FP32_SET_OPT_DTYPE`), by the public names of the operations; a test compares them with the header of the
installed torch. They hold for CUDA. The CPU's autocast computes the matmuls in low precision too, but leaves
`softmax`, `exp`, `sum` and `layer_norm` in the dtype of their input.
"""

from __future__ import annotations

#: Matmuls and convolutions: in the region's dtype, on every device.
LOWERED = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu",
    "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "multi_dot", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention",
})  # fmt: skip
#: In FP32 under CUDA's autocast, whatever the dtype of the input.
FLOAT32_ON_CUDA = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm",
    "nuclear_norm",
    "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
    "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "prod", "softmax", "log_softmax", "cumprod", "cumsum", "vector_norm", "matrix_norm", "sum", "norm",
    # composed of those above
    "cross_entropy", "gaussian_nll_loss", "interpolate", "upsample", "softmin", "square", "normalize",
})  # fmt: skip
#: Layers of `torch.nn` that call one of these operations.
LOWERED_LAYERS = frozenset({
    "Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "PReLU",
    "Bilinear",
})  # fmt: skip
FLOAT32_LAYERS = frozenset({
    "LayerNorm", "RMSNorm", "GroupNorm", "Softmax", "LogSoftmax", "Softmax2d", "Softplus", "CrossEntropyLoss",
    "NLLLoss", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "KLDivLoss", "BCEWithLogitsLoss", "Upsample",
})  # fmt: skip

#: Operations whose result has the dtype of their (first) tensor: as functions and methods.
KEEPS = frozenset({
    "view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "expand", "expand_as", "repeat",
    "repeat_interleave", "flatten", "unflatten", "flip", "roll", "chunk", "split", "unbind", "narrow", "select",
    "index_select", "gather", "masked_fill", "masked_fill_", "masked_select", "clone", "detach", "detach_", "cuda",
    "cpu", "t", "swapaxes", "movedim", "view_as", "reshape_as", "tril", "triu", "diagonal", "squeeze_", "unsqueeze_",
    "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip", "abs", "neg", "sqrt",
    "sigmoid", "tanh", "relu", "relu_", "gelu", "silu", "leaky_relu", "elu", "dropout", "mean", "var", "std", "amax",
    "amin", "sort", "topk", "cummax", "sin", "cos", "floor", "ceil", "round", "sign", "nan_to_num", "pad", "rearrange",
    "requires_grad_", "to_sparse", "index_fill", "fill_", "zero_", "pin_memory", "view_as_real",
    "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "batch_norm", "unfold", "fold", "retain_grad", "hardtanh",
    "mul_", "div_", "add_", "sub_", "copy_", "addcmul_", "addcdiv_", "scatter_", "scatter_add_", "index_add_",
    "scatter",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor",
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
})  # fmt: skip
KEEPING_LAYERS = frozenset({
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "Identity", "ReLU", "ReLU6", "GELU", "SiLU", "LeakyReLU", "Tanh",
    "Sigmoid",
    "Flatten", "Unflatten", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "MaxPool1d", "MaxPool2d", "MaxPool3d",
    "AvgPool1d", "AvgPool2d", "AvgPool3d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d",
})  # fmt: skip
#: Arithmetic with a second tensor, with type promotion: as functions and methods.
PROMOTES = frozenset({
    "add", "sub", "mul", "div", "multiply", "divide", "subtract", "true_divide", "maximum", "minimum", "where",
    "addcmul", "addcdiv", "lerp", "masked_scatter",
})  # fmt: skip
#: Functions that create FP32 without a `dtype=` argument: `torch.zeros(3)`, `torch.randn(3)`.
MAKES_FLOAT32 = frozenset({"zeros", "ones", "empty", "rand", "randn", "eye", "linspace"})
#: Methods and functions that return one or more Python numbers.
NUMBERS = frozenset({"size", "item", "numel", "dim", "tolist", "stride", "nelement", "ndimension"})
