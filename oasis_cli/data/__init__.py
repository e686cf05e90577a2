"""Text, and the batches of tokens that calibration and evaluation take from it."""
