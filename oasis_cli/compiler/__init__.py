"""Quantized model to memory image: the program, the look-up tables, and the order in which the PE lines stream."""
