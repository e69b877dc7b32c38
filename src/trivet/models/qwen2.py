"""The Qwen2 family: Qwen2 and Qwen2.5. Biases on q, k and v; sliding windows are refused."""

from trivet.models.family import Family

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    gguf="qwen2",
    gguf_permuted=False,
    qkv_bias=True,
    refused=("use_sliding_window",),
)
