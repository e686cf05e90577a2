"""Running quantized models: the layer, the transformers plug-in, loading and checking folders.

Kept free of imports: `oasis_cli` reaches `registration` through it without paying for torch.
"""
