"""The Llama family: Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2 and others of the same shape."""

from trivet.models.family import Family

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    gguf="llama",
    gguf_permuted=True,
    qkv_bias=None,
)
