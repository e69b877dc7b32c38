"""Methods of quantization, one file each; every one works on plain arrays of one or a few linears."""
